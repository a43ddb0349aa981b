"""`make smoke`: overfit one batch of a config's own data, and say whether everything learns.

A few steps on one batch by `make train` itself, with the config's model, method and learning rate, in a folder that is
removed after; then what was saved is loaded in a fresh process and answers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.inputs import config_path
from sft_play.cli.options import Options, positive
from sft_play.cli.verify_resume import read_losses, short_run
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import resolve
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import ExitCode, Interrupted
from sft_play.launch.processes import tie_to_parent
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import read_record

STEPS = 30
# Rows of the batch where `train.batch_size` is auto.
ROWS = 8
# The loss has to fall by this share, unless it is below SMALL_LOSS from the start.
FALL, SMALL_LOSS = 0.02, 0.05
# Lines that are told of a training under way, and how often it is looked at.
TOLD, LOOK_SECONDS = 6, 0.5
# Of the steps at the end, so that dropout does not decide.
LAST = 3
# Probability of the end token that counts as learned where no answer ends yet.
LEARNED = 0.5
GIB = 2**30
# What a refused start says -> the check that it belongs to.
REFUSALS = {
    "end-of-turn": "end of turn",
    "end of the turn": "end of turn",
    "end-of-sequence": "end of turn",
    "no row is left": "labels",
}
RATE_FIX = "2e-4 is usual for LoRA and 1e-5 for full fine-tuning; ARGS='--steps 100' looks longer"
FROZEN_FIX = (
    "see that nothing freezes or detaches what should be trained: tuning.lora.target_modules, the model's own code"
)
END_FIX = (
    "ARGS='--steps 100' looks longer; a token that the base has never seen needs tuning.lora.modules_to_save: "
    "[embed_tokens, lm_head], or a template whose end token it knows"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One check.

    Attributes:
        words: what was found.
        where, fix: of a failure.
    """

    name: str
    ok: bool
    words: str
    where: str = ""
    fix: str = ""

    def error_line(self) -> str:
        return f"error: {self.where}: {self.words} -> {self.fix}"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train a few steps on one batch and look at what came out.

    Returns:
        0 where every check holds, 2 where one fails, the run's own code where it could not train.

    Raises:
        SftPlayError: the config is wrong.
        Interrupted: Ctrl-C or SIGTERM; the folder is removed all the same.
    """
    parser = Options(prog="make smoke", description=__doc__)
    parser.add_argument("--steps", type=positive, default=STEPS, help="optimizer steps on the batch (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder")
    parser.add_argument("--distributed", action="store_true", help="as make train-distributed does it")
    options = parser.parse_args(list(argv))
    resolved = resolve(config_path(environ), environ, inputs=INPUTS_OF["smoke"], distributed=options.distributed)
    refuse_unavailable(resolved)
    if "MAKELEVEL" in environ:  # whatever ends make ends this, and the folder is removed
        tie_to_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = Path(resolved.config.run.output_dir) / ".cache"
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="smoke-", dir=cache))
    try:
        return smoke(resolved.config, environ, folder, options.steps, distributed=options.distributed)
    except KeyboardInterrupt:
        raise Interrupted("stopped before the end", where="smoke", fix="start it again") from None
    finally:
        if options.keep:
            print(f"kept     {folder / 'smoke'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def smoke(config: Config, environ: Mapping[str, str], folder: Path, steps: int, *, distributed: bool) -> int:
    """Train, look, print a line a check; returns the exit code."""
    run = RunDir(folder / "smoke")
    rows = config.train.batch_size if isinstance(config.train.batch_size, int) else ROWS
    print(f"training {steps} steps on one batch of {rows} {'row' if rows == 1 else 'rows'}", flush=True)
    environment = one_batch(environ, config, folder, rows, steps)
    command = "train-distributed" if distributed else "train"
    heard = Heard(run.metrics, steps)
    code, _, errors = execute([sys.executable, "-m", "sft_play", command], environment, heard.say)
    if code != ExitCode.DONE:
        return show_refusal(code, errors)
    verdicts = trained_verdicts(config, run)
    print("loading what was saved in a fresh process", flush=True)
    code, out, errors = execute([sys.executable, "-m", "sft_play.runtime.smoke", str(run.run_json)], environment)
    if code == ExitCode.DONE:
        verdicts += saved_verdicts(json.loads(out.splitlines()[-1]), config, run)
    else:
        last = (errors.strip().splitlines() or [f"it ended with code {code}"])[-1]
        where, fix = str(run.checkpoints), "ARGS=--keep keeps the folder"
        verdicts.append(Verdict(name="reload", ok=False, words=f"cannot be loaded: {last}", where=where, fix=fix))
    verdicts.append(memory_verdict(run))
    for verdict in verdicts:
        print(f"  {verdict.name:<13} {'ok' if verdict.ok else 'FAIL':<5} {verdict.words}", flush=True)
    failed = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in failed:
        print(verdict.error_line(), file=sys.stderr)
    print("everything learns" if not failed else f"{len(failed)} of {len(verdicts)} checks failed")
    return ExitCode.CONFIG_OR_DATA if failed else ExitCode.DONE


def one_batch(environ: Mapping[str, str], config: Config, folder: Path, rows: int, steps: int) -> dict[str, str]:
    """The environment of the run: the same rows in every step, and nothing that would hide how it learns."""
    fixed = isinstance(config.train.batch_size, int)
    batch = {
        "DATA_MAX_ROWS": str(rows),
        "DATA_VALIDATION": "none",
        "DATA_TEST": "none",
        "DATA_SPLIT_VALIDATION": "0",
        "DATA_SPLIT_TEST": "0",
        "DATA_STREAMING": "false",
        "TRAIN_GRAD_ACCUM": "1" if fixed else "auto",
        "TRAIN_GLOBAL_BATCH_SIZE": "none" if fixed else str(rows),
        "TRAIN_SCHEDULER": "constant",
        "TRAIN_WARMUP": "0",
        "TRAIN_DATALOADER_DROP_LAST": "false",
        "RUN_NAME": "smoke",
        "MAKELEVEL": "1",  # what this starts ends with it
    }
    return {**short_run(environ, folder.resolve(), steps), **batch}


class Heard:
    """What is told of a training that is under way: the loss, about TOLD times over its steps.

    Args:
        metrics: the file that it is written to.
    """

    def __init__(self, metrics: Path, steps: int) -> None:
        self._metrics, self._steps, self._told = metrics, steps, 0

    def say(self) -> None:
        events = read_losses(self._metrics)
        if events and events[-1]["step"] >= self._told + self._steps / TOLD:
            self._told = events[-1]["step"]
            print(f"  step {self._told} of {self._steps}: loss {events[-1]['loss']:.4f}", flush=True)


def execute(
    words: Sequence[str], environment: Mapping[str, str], meanwhile: Callable[[], None] = lambda: None
) -> tuple[int, str, str]:
    """Run to the end; returns code, output and errors. Ctrl-C reaches the process too, and it is waited for.

    Args:
        meanwhile: called every LOOK_SECONDS.
    """
    process = subprocess.Popen(words, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, errors = process.communicate(timeout=LOOK_SECONDS)
                return process.returncode, out, errors
            meanwhile()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def show_refusal(code: int, errors: str) -> int:
    """What kept the run from its end, as the failing line of the check that it belongs to."""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    text = " ".join(lines)
    name = next((check for words, check in REFUSALS.items() if words in text), "training")
    first = lines[0].removeprefix("error: ") if lines else f"it ended with code {code}"
    print(f"  {name:<13} FAIL  {first}", flush=True)
    for line in lines or [f"error: smoke: the run ended with code {code}"]:
        print(line, file=sys.stderr)
    return code


def trained_verdicts(config: Config, run: RunDir) -> list[Verdict]:
    """What the run's own figures say: the loss, and the gradients."""
    events = read_losses(run.metrics)
    losses = [event["loss"] for event in events]
    last = sum(losses[-LAST:]) / len(losses[-LAST:])
    fall = 1 - last / losses[0] if losses[0] else 0.0
    learned = losses[0] < SMALL_LOSS and last < SMALL_LOSS
    words = f"{losses[0]:.4f} -> {last:.4f} ({-fall:+.0%}) in {len(losses)} steps"
    if not (learned or fall >= FALL):
        words = f"the loss does not fall: {words}, at a learning rate of {config.train.learning_rate:g}"
    norms = [event["grad_norm"] for event in events if event.get("grad_norm") is not None]
    moving = any(norms) or not norms
    where, fix = ("train.learning_rate", RATE_FIX) if moving else ("tuning", FROZEN_FIX)
    loss = Verdict(name="loss", ok=learned or fall >= FALL, words=words, where=where, fix=fix)
    words = f"norm {norms[0]:.3g} -> {norms[-1]:.3g}" if norms else "no norm is told"
    words = words if moving else "every gradient is zero: the model is frozen"
    return [loss, Verdict(name="gradients", ok=moving, words=words, where="tuning", fix=FROZEN_FIX)]


def saved_verdicts(look: dict[str, Any], config: Config, run: RunDir) -> list[Verdict]:
    """What the fresh process found (`runtime/smoke.py`)."""
    weights, unmoved = look["weights"], look["unmoved"]
    moved = weights - len(unmoved)
    words = f"{moved} of {weights} trained tensors moved" + (f"; not {unmoved[0]}" if moved and unmoved else "")
    where, fix = "tuning", FROZEN_FIX
    if not moved:
        words = f"none of {weights} trained tensors moved, such as {(unmoved or ['any'])[0]}: the model is frozen"
    if not moved and config.train.learning_rate == 0:
        where, fix, words = "train.learning_rate", RATE_FIX, f"is 0, so none of {weights} trained tensors moved"
    found = [Verdict(name="weights", ok=moved > 0, words=words, where=where, fix=fix)]
    found.append(
        Verdict(name="labels", ok=look["documents"] > 0, words=f"{look['documents']} rows have learned tokens")
    )
    return [*found, end_verdict(look), reload_verdict(look, run)]


def end_verdict(look: dict[str, Any]) -> Verdict:
    """Whether the end of an answer is learned, and produced."""
    name, where = "end of turn", "model.chat_template"
    if not look["with_end"]:
        what = "no row has a learned token that ends it: answers would never stop"
        return Verdict(name=name, ok=False, words=what, where=where, fix="see make data-check, or model.max_seq_len")
    answers, chance = look["answers"], look["chance_of_end"]
    words = f"{look['ended']} of {len(answers)} answers end by themselves; its probability is {chance:.2f}"
    shown = f"; one reads {answers[0][:60]!r}" if answers else ""
    ok = look["ended"] > 0 or chance >= LEARNED
    return Verdict(
        name=name, ok=ok, words=words + shown if ok else f"the end is not learned: {words}", where=where, fix=END_FIX
    )


def reload_verdict(look: dict[str, Any], run: RunDir) -> Verdict:
    """Whether the checkpoint holds what was trained: its loss is near the last one, and the result answers alike."""
    losses = [event["loss"] for event in read_losses(run.metrics)]
    near = look["loss"] <= losses[-1] + max(0.5 * (losses[0] - losses[-1]), 0.05 * losses[0])
    words = f"{look['checkpoint']} loaded again has loss {look['loss']:.4f}, the last step had {losses[-1]:.4f}"
    same = "the result answers alike" if look["same_answers"] else "the result answers otherwise"
    fix = "a fault of this program: report it with your config"
    ok = near and look["same_answers"]
    return Verdict(name="reload", ok=ok, words=f"{words}; {same}", where=look["checkpoint"], fix=fix)


def memory_verdict(run: RunDir) -> Verdict:
    """Peak memory beside the plan's; told, not judged: one batch is not the longest."""
    record = read_record(run) or {}
    measured, planned = record["measured"]["memory_bytes"], record["predicted"]["allocated_bytes"]
    words = f"{measured / GIB:.2f} GiB measured, {planned / GIB:.2f} planned"
    return Verdict(name="memory", ok=True, words=words)
