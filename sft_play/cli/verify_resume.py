"""`make verify-resume`: prove on this config and machine that a stopped run goes on as if nothing had happened.

The run is trained for some steps straight, and once more with a stop in the middle and the same command again. Final
weights, optimizer state and every loss are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.inputs import config_path
from sft_play.cli.options import Options, positive
from sft_play.config.inputs import INPUTS_OF, MAKE_VARIABLES
from sft_play.config.resolve import resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.errors import EnvironmentProblem, ExitCode, RankFailedError, UsageError
from sft_play.record.checkpoints import newest_first
from sft_play.record.manifest import read_manifest
from sft_play.record.run_dir import RunDir

STEPS = 12
LOOK_SECONDS = 0.05
# What holds times and paths beside state.
NOT_COMPARED = ("trainer_state.json", "README.md")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing that was compared: equal to the bit, or how far apart."""

    name: str
    equal: bool
    words: str


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train straight, train with a stop, compare.

    Raises:
        SftPlayError: the config is wrong, a run ended otherwise than it should, or the two differ.
    """
    parser = Options(prog="make verify-resume", description=__doc__)
    parser.add_argument("--steps", type=positive, default=STEPS, help="steps of each run (%(default)s)")
    parser.add_argument("--distributed", action="store_true", help="as make train-distributed does it")
    options = parser.parse_args(list(argv))
    if options.steps < 4:
        raise UsageError("4 steps are the fewest that can be stopped in the middle", where="ARGS")
    resolved = resolve(
        config_path(environ), environ, inputs=INPUTS_OF["verify-resume"], distributed=options.distributed
    )
    refuse_unavailable(resolved)
    folder = Path(resolved.config.run.output_dir) / ".cache" / "verify-resume"
    for name in ("straight", "stopped"):
        shutil.rmtree(folder / name, ignore_errors=True)  # ours alone: nothing else writes below .cache
    command = "train-distributed" if options.distributed else "train"
    environment = short_run(environ, folder, options.steps)
    print(f"straight: {options.steps} steps", flush=True)
    straight = train(command, {**environment, "RUN_NAME": "straight"})
    print(f"stopped: a stop is asked for after step {options.steps // 2}, then the same command again", flush=True)
    stop_at = train_and_stop(command, {**environment, "RUN_NAME": "stopped"}, folder / "stopped", options.steps // 2)
    train(command, {**environment, "RUN_NAME": "stopped"})
    print(f"it was stopped after step {stop_at}\n")
    verdicts = compare(RunDir(folder / "straight"), RunDir(folder / "stopped"))
    for verdict in verdicts:
        print(f"  {verdict.name:<18} {'equal' if verdict.equal else 'DIFFERS':<9} {verdict.words}")
    print(f"\n{straight} s straight")
    if all(verdict.equal for verdict in verdicts):
        print("a stopped run of this config goes on to the bit")
        return ExitCode.DONE
    raise RankFailedError(
        "the stopped run is another one than the straight one",
        where="verify-resume",
        fix="on a GPU set train.deterministic: true; what differs then is a fault of this program: report it",
    )


def short_run(environ: Mapping[str, str], folder: Path, steps: int) -> dict[str, str]:
    """The environment of both runs: a few steps, in a folder of their own, nothing written down elsewhere."""
    given = {name: value for name, value in environ.items() if name not in ("ARGS", MAKE_VARIABLES)}
    # Checkpoints where the run is asked to stop and at its end; epochs would end elsewhere than steps.
    short = {
        "TRAIN_MAX_STEPS": str(steps),
        "TRAIN_SAVE_STRATEGY": "steps",
        "TRAIN_SAVE_STEPS": str(steps),
        "TRAIN_SAVE_TOTAL_LIMIT": "none",
        "TRAIN_LOGGING_STEPS": "1",
        "TRAIN_EVAL_STRATEGY": "no",
        "TRAIN_EVAL_ON_START": "false",
        "TRAIN_LOAD_BEST_MODEL_AT_END": "false",
        "TRAIN_METRIC_FOR_BEST_MODEL": "none",
        "TRAIN_EARLY_STOPPING_PATIENCE": "none",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "RUN_REPORT_TO": "[]",
        "RUN_RESUME": "auto",
        "RUN_OUTPUT_DIR": str(folder),
    }
    return {**given, **short}


def train(command: str, environment: Mapping[str, str]) -> int:
    """Run to the end; returns the seconds it took.

    Raises:
        RankFailedError: it did not end well; its own lines were printed.
    """
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "sft_play", command], env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RankFailedError(f"the run ended with code {done.returncode}", where=environment["RUN_NAME"])
    return round(time.monotonic() - started)


def train_and_stop(command: str, environment: Mapping[str, str], run: Path, step: int) -> int:
    """Send SIGTERM once a step is logged; returns the step that was saved.

    Raises:
        EnvironmentProblem: the steps are so fast that the run was at its end first.
        RankFailedError: it ended otherwise than stopped.
    """
    process = subprocess.Popen([sys.executable, "-m", "sft_play", command], env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and last_step(run / "metrics.jsonl") < step:
        time.sleep(LOOK_SECONDS)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    code = process.returncode
    if code == ExitCode.DONE:
        fix = f"ARGS='--steps {4 * step}' leaves more time"
        raise EnvironmentProblem("the run was at its end before it could be stopped", where="verify-resume", fix=fix)
    if code != ExitCode.PREEMPTED:
        print(errors, file=sys.stderr, end="")
        raise RankFailedError(f"the run ended with code {code} instead of {int(ExitCode.PREEMPTED)}", where="stopped")
    return last_step(run / "metrics.jsonl")


def last_step(metrics: Path) -> int:
    """The last training step that was logged; 0 before the first."""
    steps = [event["step"] for event in read_losses(metrics)]
    return steps[-1] if steps else 0


def read_losses(metrics: Path) -> list[dict[str, Any]]:
    """The training events of a run, in order."""
    if not metrics.is_file():
        return []
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in map(json.loads, lines) if event["event"] == "train"]


def compare(straight: RunDir, stopped: RunDir) -> list[Verdict]:
    """Losses, gradient norms, learning rates, and the files of the last checkpoint and of the result."""
    verdicts = []
    events = [read_losses(run.metrics) for run in (straight, stopped)]
    for name in ("loss", "grad_norm", "learning_rate"):
        one, other = ([event[name] for event in each] for each in events)
        apart = max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)
        words = f"{len(one)} and {len(other)} steps, largest difference {apart:.3g}"
        verdicts.append(Verdict(name=name, equal=one == other, words=words))
    folders = [newest_first(run)[0] for run in (straight, stopped)]
    verdicts.append(_files("last checkpoint", *folders))
    results = [run.adapter if run.adapter.is_dir() else run.model for run in (straight, stopped)]
    verdicts.append(_files("result", *results))
    return verdicts


def _files(name: str, one: Path, other: Path) -> Verdict:
    """Compare two folders by the checksums of their manifests."""
    sums = [
        {file: entry["sha256"] for file, entry in read_manifest(folder)["files"].items() if file not in NOT_COMPARED}
        for folder in (one, other)
    ]
    different = sorted(file for file in {*sums[0], *sums[1]} if sums[0].get(file) != sums[1].get(file))
    words = f"{', '.join(different)}" if different else f"{one.name}: {', '.join(sorted(sums[0]))}"
    return Verdict(name=name, equal=not different, words=words)
