"""A run's folder: its name, its places and its marker. Nothing without the marker is ever deleted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sft_play.config.rules import RUN_NAME_PATTERN
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentProblem, RunLockedError

MARKER = ".sft-play"
# How often, and after how long each time, a lock is tried again that somebody may only be looking at.
LOOKS, LOOK_SECONDS = 5, 0.02
# What must be the same for two starts to be one run; saving, logging and evaluation are free to change.
FREE_TRAIN_KEYS = (
    "logging_", "save_", "eval_", "dataloader_num", "dataloader_pin", "dataloader_pers", "dataloader_prefetch",
    "predict_", "generation_", "ddp_", "tf32",
)  # fmt: skip


@dataclass(frozen=True)
class RunDir:
    """Every place inside one run's folder.

    Attributes:
        node: number of this machine. Where several share the folder, each but the first keeps what it was told, its
            log, its lock and its ranks' outcomes under launch/node-<number>, so that none writes over another's.
    """

    path: Path
    node: int = 0

    @property
    def own(self) -> Path:
        """Where this machine's own files begin."""
        return self.path / "launch" / f"node-{self.node}" if self.node else self.path

    @property
    def run_json(self) -> Path:
        return self.own / "run.json"

    @property
    def config_yaml(self) -> Path:
        return self.own / "config.yaml"

    @property
    def log(self) -> Path:
        return self.own / "run.log"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def attempts(self) -> Path:
        return self.own / "attempts"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def amendments(self) -> Path:
        return self.path / "amendments.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def launch(self) -> Path:
        return self.own if self.node else self.path / "launch"

    @property
    def accelerate_yaml(self) -> Path:
        return self.launch / "accelerate.yaml"

    @property
    def command_txt(self) -> Path:
        """The command line that started the processes of this machine."""
        return self.launch / "command.txt"

    @property
    def deepspeed_json(self) -> Path:
        return self.launch / "deepspeed.json"

    def rank_log(self, rank: int) -> Path:
        """What a rank other than 0 would have said."""
        return self.launch / f"rank-{rank}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def create(self) -> None:
        """Make the folder and its marker.

        Raises:
            EnvironmentProblem: the place cannot be written, or holds something that is not a run.
        """
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / MARKER).is_file():
                raise EnvironmentProblem(
                    "the folder exists and is no run of sft-play", where=str(self.path), fix="choose another RUN_NAME"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / MARKER).touch()  # before anything else: another machine may look at this moment
            for folder in (self.launch, self.checkpoints, self.tensorboard, self.attempts):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write there ({error.strerror})", where=str(self.path), fix="set run.output_dir elsewhere"
            ) from error


def run_name(stem: str, config: Config) -> str:
    """`run.name`, else the config's stem and a short hash of what must match on resume.

    Raises:
        ConfigError: `run.name` is no plain folder name.
    """
    if config.run.name is None:
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', stem).lstrip('.')}-{config_hash(config)[:8]}"
    if not RUN_NAME_PATTERN.fullmatch(config.run.name):
        raise ConfigError(
            f"{config.run.name!r} is no plain folder name", where="run.name", fix="use letters, digits, '.', '_', '-'"
        )
    return config.run.name


def must_match(config: Config) -> dict[str, Any]:
    """The values that a resumed run has to share with the run that it goes on with."""
    values = config.model_dump(mode="json", include={"model", "tuning", "data", "train"})
    values["train"] = {key: value for key, value in values["train"].items() if not key.startswith(FREE_TRAIN_KEYS)}
    return values


def config_hash(config: Config) -> str:
    """Hex sha256 of `must_match`."""
    return hashlib.sha256(json.dumps(must_match(config), sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(run: RunDir) -> Iterator[int]:
    """Hold this machine's lock of the run.

    The kernel drops it with the last process that has it open, so a stale one cannot be.

    Yields:
        The lock's file descriptor, for the worker to hold too: it may outlive its parent while it saves.

    Raises:
        RunLockedError: another process holds it, named by its id.
    """
    with (run.launch / "lock").open("a+") as stream:
        try:
            _take(stream)
        except BlockingIOError as error:
            stream.seek(0)
            raise RunLockedError(f"process {stream.read().strip()} works here", where=str(run.path)) from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield stream.fileno()


def _take(stream: IO[str]) -> None:
    """Lock a file. Whoever looks whether it is locked (`report/state.py`) holds it for a moment: that is waited for.

    Raises:
        BlockingIOError: another process keeps it.
    """
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOOK_SECONDS)
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: readers see the old text or the new one."""
    staging = path.with_name(f".{path.name}.new")
    with staging.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    staging.replace(path)
