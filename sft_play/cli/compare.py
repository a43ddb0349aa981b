"""`make compare`: several runs over each other, with the differences of their configs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sft_play.cli.inputs import run_folders, warn_of_damage
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import EnvironmentProblem, UsageError


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write one HTML file beside the first of RUNS and say where it is.

    Raises:
        UsageError: RUNS names fewer than two runs, or something that is none.
        EnvironmentProblem: the file cannot be written.
    """
    Options(prog="make compare", description=__doc__).parse_args(argv)
    check_inputs(environ, INPUTS_OF["compare"])
    folders = run_folders(environ)
    if len(folders) < 2:
        raise UsageError("name two runs or more", where="RUNS", fix='RUNS="runs/A runs/B"; make runs lists them')
    for folder in folders:
        warn_of_damage(folder)
    from sft_play.report.compare import write_comparison

    try:
        print(write_comparison(folders))
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise EnvironmentProblem(what, where=str(folders[0].parent), fix="make room there, or allow writing") from error
    return 0
