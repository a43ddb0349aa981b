"""`make report`: what a run did and came to, as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sft_play.cli.inputs import run_folder, warn_of_damage
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import EnvironmentProblem, UsageError


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Write report.html into the folder of RUN, finished or not, and say where it is.

    Raises:
        UsageError: RUN is missing or names no run.
        EnvironmentProblem: the file cannot be written.
    """
    Options(prog="make report", description=__doc__).parse_args(argv)
    check_inputs(environ, INPUTS_OF["report"])
    if not environ.get("RUN"):
        raise UsageError("RUN is missing", fix="name a run, such as RUN=runs/NAME; make runs lists them")
    folder = run_folder(environ["RUN"], "RUN", environ)
    warn_of_damage(folder)
    from sft_play.report.page import write_report

    try:
        print(write_report(folder))
    except OSError as error:
        what = f"the report cannot be written ({error.strerror})"
        raise EnvironmentProblem(what, where=str(folder), fix="make room there, or allow writing") from error
    return 0
