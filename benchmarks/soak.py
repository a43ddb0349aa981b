"""Kill a run again and again at random moments, and see whether it ends as if nothing had happened.

    make soak KILLS=200 SEED=0

A tiny real run, of one process and of two ranks by turns, gets SIGKILL (the parent, the worker or one rank) at
moments drawn from the seed, and is started again by the same command each time. Its final weights, its last
checkpoint and its losses must equal those of the run that was never killed, to the bit, with nothing left over:
no half file, no trash, no lock, no process. Exit code 1 on any difference. Reads /proc, so it needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sft_play.launch.processes import descendants, environment_of, ranks_below
from tests.tiny import Workplace, make_model, make_workplace

STEPS, SAVE_STEPS, EVAL_STEPS = 12, 3, 4
MOST_KILLS_A_RUN = 12
# How long a worker may outlive the parent that was killed: it saves what it has and leaves.
LEAVE_SECONDS = 60.0
LIMIT_SECONDS = 300.0
MARK = "SFT_PLAY_SOAK"
KILLED_CODES = (6, -signal.SIGKILL)


@dataclass(frozen=True)
class Kind:
    """How a run is started."""

    name: str
    command: str
    variables: dict[str, str]
    victims: tuple[str, ...]


KINDS = (
    Kind("one process", "train", {}, ("parent", "worker")),
    Kind("two ranks", "train-distributed", {"NUM_GPUS": "2", "TRAIN_BATCH_SIZE": "2"}, ("parent", "rank 0", "rank 1")),
)


@dataclass(frozen=True)
class Moment:
    """When to kill: `delay` seconds after the start, or after the line of a step."""

    step: int | None
    delay: float
    victim: str


@dataclass
class Kill:
    """One kill: what the run did at that moment, and what it cost."""

    victim: str
    phase: str
    steps_lost: int = 0
    resume_seconds: float | None = None


@dataclass
class Start:
    """One start of the command: its output with the second each line came at."""

    process: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def said(self, pattern: str) -> re.Match[str] | None:
        """The last line that matches, from its beginning."""
        return next((found for _, line in reversed(self.lines) if (found := re.match(pattern, line))), None)

    @property
    def step(self) -> int:
        """The last step it told of."""
        found = self.said(STEP)
        return int(found[1]) if found else 0

    @property
    def resumed_from(self) -> int:
        found = self.said(r"resuming from .*step-(\d+)$")
        return int(found[1]) if found else 0

    @property
    def first_step_seconds(self) -> float | None:
        """Seconds from the start to the end of the first step; None where there was none to train."""
        return next((second for second, line in self.lines if re.match(STEP, line)), None)


STEP = r"step +(\d+)/"


@dataclass
class Soak:
    """Everything that was seen."""

    workplace: Workplace
    random: random.Random
    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    runs: int = 0

    def start(self, kind: Kind, name: str) -> tuple[Start, threading.Thread]:
        words = [sys.executable, "-m", "sft_play", kind.command]
        variables = {"CONFIG": "tiny.yaml", "RUN_NAME": name, MARK: name, **kind.variables}
        process = subprocess.Popen(
            words,
            cwd=self.workplace.path,
            env=self.workplace.environ(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        start = Start(process)
        reader = threading.Thread(target=start.follow, daemon=True)
        reader.start()
        return start, reader

    def straight(self, kind: Kind, name: str) -> tuple[dict[str, object], float]:
        """What the run comes to when nobody kills it, and the seconds it takes."""
        start, reader = self.start(kind, name)
        code = start.process.wait(LIMIT_SECONDS)
        reader.join()
        if code:
            sys.exit(f"the straight run ended with {code}:\n" + "\n".join(line for _, line in start.lines[-20:]))
        return outcome(self.workplace, name), time.monotonic() - start.began

    def trial(self, kind: Kind, name: str, kills: int, wanted: dict[str, object], seconds: float) -> str:
        """One run, killed up to `kills` times, then left alone; returns its line."""
        pending: Kill | None
        run, pending, done = self.workplace.path / "runs" / name, None, 0
        reached = 0  # the last step told of before the kill that is pending
        wrong: list[str] = []
        while not wrong:
            moment = draw(self.random, kind, seconds) if done < kills else None
            start, reader = self.start(kind, name)
            try:
                hit = moment is not None and strike(start, moment)
                code = start.process.wait(LIMIT_SECONDS)
            finally:
                left = wait_until_gone(name, LEAVE_SECONDS if moment else 5.0)
            reader.join()
            if pending and start.first_step_seconds:
                pending.steps_lost = max(0, reached - start.resumed_from)
                pending.resume_seconds = start.first_step_seconds
                pending = None
            if left:
                wrong.append(f"{len(left)} processes outlive it")
            reached = max(reached, start.step)
            if hit and moment:
                done += 1
                self.kills.append(Kill(moment.victim, phase_of(start)))
                pending, reached = pending or self.kills[-1], start.step or reached
            if start.said(r"checkpoint .* is set aside"):
                wrong.append("a checkpoint was damaged by a kill")
            if finished(run):
                wrong += self.says_finished(kind, name) if hit else []
                break
            if code not in (KILLED_CODES if hit else (0,)):
                wrong.append(f"code {code}: {' | '.join(line for _, line in start.lines[-4:])}")
        wrong += compare(outcome(self.workplace, name), wanted) if not wrong else []
        wrong += leftovers(self.workplace.path / "runs", run) if not wrong else []
        self.runs += 1
        self.differences += [f"{name}: {one}" for one in wrong]
        if not wrong:
            shutil.rmtree(run)
        hits = ", ".join(f"{kill.victim} in {kill.phase}" for kill in self.kills[len(self.kills) - done :])
        return f"{name} ({kind.name}): killed {done} times ({hits}): {'; '.join(wrong) or 'equal to the bit'}"

    def says_finished(self, kind: Kind, name: str) -> list[str]:
        """What a start says after a kill that came too late to matter; it takes away what the killed one left."""
        again, reader = self.start(kind, name)
        code = again.process.wait(LIMIT_SECONDS)
        reader.join()
        return [] if code == 3 and again.said(".*this run is finished") else [f"code {code} of a finished run"]

    def summary(self) -> str:
        """Kills, where they hit, what they cost, and what differed."""
        lost = [kill.steps_lost for kill in self.kills]
        waits = [kill.resume_seconds for kill in self.kills if kill.resume_seconds is not None]
        where = ", ".join(f"{phase} {number}" for phase, number in Counter(k.phase for k in self.kills).most_common())
        whom = ", ".join(f"{one} {number}" for one, number in Counter(k.victim for k in self.kills).most_common())
        lines = [f"{len(self.kills)} kills in {self.runs} finished runs", f"hit while: {where}", f"killed: {whom}"]
        if lost:
            lines.append(
                f"steps lost a kill: mean {statistics.mean(lost):.2f}, most {max(lost)} (saved every {SAVE_STEPS})"
            )
        if waits:
            lines.append(
                f"seconds from a start to its first step: median {statistics.median(waits):.1f}, most {max(waits):.1f}"
            )
        lines.append(f"differences: {len(self.differences)}")
        return "\n".join([*lines, *self.differences])


def draw(source: random.Random, kind: Kind, seconds: float) -> Moment:
    """Two of three kills come around a step, the others at any moment from the start on."""
    victim = source.choice(kind.victims)
    if source.random() < 1 / 3:
        return Moment(None, source.uniform(0, seconds), victim)
    step = source.randint(1, STEPS)
    return Moment(step, source.uniform(0, 1.5 if step == STEPS else 0.15), victim)


def strike(start: Start, moment: Moment) -> bool:
    """Wait for the moment and kill; False where the run ended before."""
    limit = start.began + LIMIT_SECONDS
    while moment.step is not None and start.step < moment.step:
        if start.process.poll() is not None or time.monotonic() > limit:
            return False
        time.sleep(0.002)
    until = time.monotonic() + moment.delay
    while time.monotonic() < until:
        if start.process.poll() is not None:
            return False
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim_of(start.process.pid, moment.victim), signal.SIGKILL)
        return start.process.poll() is None
    return False


def victim_of(parent: int, victim: str) -> int:
    """The process to kill; the parent as long as the one that is meant does not live yet."""
    if victim == "worker":
        below = descendants(parent)
        return below[0] if below else parent
    if victim.startswith("rank "):
        for pid in ranks_below(parent):
            if environment_of(pid).get("RANK") == victim.removeprefix("rank "):
                return pid
    return parent


def phase_of(start: Start) -> str:
    """What the run was doing, from the last line it printed."""
    step = start.step
    if not step:
        return "load"
    if step % EVAL_STEPS == 0 and not start.said(rf"evaluated at step {step}:"):
        return "eval"
    if step % SAVE_STEPS == 0 and not start.said(rf"saved checkpoints/step-{step}$"):
        return "save"
    return "finish" if step == STEPS else "step"


def processes_of(name: str) -> list[int]:
    """Every living process that was started for a run."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment_of(pid).get(MARK) == name]


def wait_until_gone(name: str, seconds: float) -> list[int]:
    """Processes of a run that still live after `seconds`; those are ended."""
    until = time.monotonic() + seconds
    while (left := processes_of(name)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def finished(run: Path) -> bool:
    """Whether the run has its result on record."""
    record = run / "record.json"
    return record.is_file() and json.loads(record.read_text())["outcome"] == "done"


def outcome(workplace: Workplace, name: str) -> dict[str, object]:
    """What two equal runs share: the bytes of result and last checkpoint, and every loss by its step."""
    run = workplace.path / "runs" / name
    names = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt")
    files = [run / "adapter" / names[0], *(run / f"checkpoints/step-{STEPS}" / one for one in names)]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        **{str(file.relative_to(run)): file.read_bytes() for file in files},
        "losses": [(event["step"], event["loss"], event["grad_norm"]) for event in events if event["event"] == "train"],
        "held-out losses": {event["step"]: event["eval_loss"] for event in events if event["event"] == "eval"},
        # A worker whose parent was killed saves at another step than the straight run, so only these are equal.
        "number of checkpoints": len(list((run / "checkpoints").iterdir())),
    }


def compare(found: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """The names of what differs."""
    return [f"{name} differs" for name in wanted if found[name] != wanted[name]]


def leftovers(runs: Path, run: Path) -> list[str]:
    """Half files, trash, damaged folders and a held lock, in the run's folder and in the cache beside it."""
    names = [path for path in [*run.rglob("*"), *(runs / ".cache").rglob("*")] if suspicious(path.name)]
    found = [f"left over: {path.relative_to(runs)}" for path in names]
    return found if lock_is_free(run / "launch/lock") else [*found, "the lock is still held"]


def lock_is_free(path: Path) -> bool:
    """Whether nobody holds a lock any more; a process that is just ending drops it last."""
    with path.open("a") as lock:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.05)
    return False


def suspicious(name: str) -> bool:
    """Whether a finished run has no such file."""
    hidden = name.startswith(".") and not name.startswith(".sft-play")
    return hidden or name.startswith("damaged-") or name.endswith((".tmp", ".new", ".part"))


def make_soak(folder: Path, seed: int) -> Soak:
    """A tiny model with dropout, evaluated and saved often."""
    workplace = make_workplace(folder, make_model(folder / "model"))
    workplace.config["tuning"] = {"mode": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    often = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "eval_strategy": "steps", "eval_steps": EVAL_STEPS}
    workplace.write(train={**workplace.config["train"], **often})
    return Soak(workplace, random.Random(seed))


def soak_for(soak: Soak, kills: int, kinds: tuple[Kind, ...] = KINDS) -> None:
    """Trials by turns until so many kills are done, each told in a line."""
    tag = uuid.uuid4().hex[:6]  # a run of another soak on this machine is not ours
    wanted = {kind.name: soak.straight(kind, f"straight-{tag}-{number}") for number, kind in enumerate(kinds)}
    while len(soak.kills) < kills:
        kind = kinds[soak.runs % len(kinds)]
        number = min(kills - len(soak.kills), soak.random.randint(1, MOST_KILLS_A_RUN))
        print(soak.trial(kind, f"run-{tag}-{soak.runs:03d}", number, *wanted[kind.name]), flush=True)


def stop(number: int, frame: FrameType | None) -> None:
    """Leave early, with the summary of what was done."""
    raise KeyboardInterrupt


def main() -> int:
    """Soak, and print what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=int(os.environ.get("KILLS") or 200))
    options.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or 0))
    chosen = options.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = make_soak(folder, chosen.seed)
    try:
        soak_for(soak, chosen.kills)
    except KeyboardInterrupt:
        print(f"stopped after {len(soak.kills)} of {chosen.kills} kills")
    print(soak.summary())
    if soak.differences:
        print(f"what they left lies in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
