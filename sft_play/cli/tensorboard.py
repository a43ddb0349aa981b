"""`make tensorboard`: all runs in TensorBoard, until Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sft_play.cli.inputs import output_dir, tensorboard_port
from sft_play.cli.options import Options
from sft_play.cli.run_start import say
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import UsageError
from sft_play.launch.processes import tie_to_parent
from sft_play.launch.tensorboard import tensorboard
from sft_play.report.state import runs_in

LOOK_SECONDS = 0.2


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve the output folder on this machine alone, on the first free port.

    Raises:
        UsageError: there is no run to show.
        EnvironmentProblem: no port is free, or the server does not start.
    """
    Options(prog="make tensorboard", description=__doc__).parse_args(argv)
    check_inputs(environ, INPUTS_OF["tensorboard"])
    folder, port = output_dir(environ), tensorboard_port(environ)
    if not runs_in(folder):
        raise UsageError("holds no run", where=str(folder), fix="train one, or name another folder: RUN_OUTPUT_DIR=...")
    if "MAKELEVEL" in environ:  # whatever ends make ends the server
        tie_to_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = folder / ".cache"
    cache.mkdir(exist_ok=True)
    with suppress(KeyboardInterrupt), tensorboard(folder, cache / "tensorboard.log", port, say) as ready:
        ready()
        say("Ctrl-C ends it")
        while True:  # not signal.pause: one that comes just before it would be waited out for ever
            time.sleep(LOOK_SECONDS)
    return 0
