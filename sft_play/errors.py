"""Every error a user can cause: one class a cause, each with its exit code and a way out.

An error is one line: where it is, what is wrong, how to fix it. The command line prints that line and
leaves with `exit_code`; a traceback appears only under `--debug`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

COLUMN_CHARACTERS = 40
"""Widest column of a table under an error."""


class ExitCode(IntEnum):
    """Exit codes of `python -m sft_play` (make turns every failure into 2 and prints the code)."""

    DONE = 0
    CONFIG_OR_DATA = 2
    RESUME_REFUSED = 3
    ENVIRONMENT = 4
    NOT_FINITE = 5
    RANK_FAILED = 6
    PREEMPTED = 75
    INTERRUPTED = 130


class SftPlayError(Exception):
    """Root of all errors of this package. docs/errors.md is made from the classes below.

    Attributes:
        hint: the command or the change to try.
        evidence: what the line shows of the cause.

    Args:
        what: what is wrong, without a full stop.
        where: the file and line, key, variable or device it was found at.
        fix: how to mend it; the class's `hint` where empty.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.CONFIG_OR_DATA
    hint: ClassVar[str] = ""
    evidence: ClassVar[str] = ""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = _one_line(what)
        self.where = _one_line(where)
        self.fix = _one_line(fix or self.hint)
        super().__init__(self.line())

    def line(self) -> str:
        """The error as the one line a user reads."""
        place = f"{self.where}: " if self.where else ""
        cure = f" -> {self.fix}" if self.fix else ""
        return f"{place}{self.what}{cure}"

    def lines(self) -> list[str]:
        """One line an error; more than one only for `SeveralErrors`."""
        return [self.line()]


class SeveralErrors(SftPlayError):
    """Errors that were found together and are reported together; the exit code is the first one's.

    Args:
        errors: at least one error, in the order in which they are printed.
    """

    def __init__(self, errors: Sequence[SftPlayError]) -> None:
        self.errors = [one for error in errors for one in _flatten(error)]
        super().__init__("; ".join(error.line() for error in self.errors))

    @property
    def code(self) -> ExitCode:
        return self.errors[0].exit_code

    def lines(self) -> list[str]:
        return [error.line() for error in self.errors]


class ConfigError(SftPlayError):
    """A key, a value or a file of the config is wrong."""

    hint = "see docs/configuration.md"
    evidence = "the file and line (or the variable), the key, the value and what the key takes"


class UnknownKeyError(ConfigError):
    """A key or variable that no section has."""

    evidence = "the file and line or the variable, and the nearest right name"


class NotAvailableError(ConfigError):
    """A key that the schema knows and this version cannot honour yet."""

    hint = "remove it or set it back to its default"
    evidence = "the key, its value and where it was set"


class UsageError(SftPlayError):
    """A command was called with an input missing or malformed."""

    hint = "make help lists the commands and their inputs"
    evidence = "the input or the word of ARGS, and what it takes"


class DataError(SftPlayError):
    """A data file, a row or a chat template is unusable."""

    hint = "docs/data.md shows the formats"
    evidence = "the file, line and column, the field, the reason and how the row begins; every bad row up to a limit"


class ModelError(SftPlayError):
    """A model folder is incomplete or a model cannot do what the config asks."""

    hint = "name a folder with config.json, tokenizer.json and *.safetensors, or a hub id"
    evidence = "the folder, and each file that is missing or damaged with its size"


class ResumeRefusedError(SftPlayError):
    """A checkpoint exists and may not be continued by this run."""

    exit_code = ExitCode.RESUME_REFUSED
    hint = "RUN_RESUME=never starts anew, RUN_NAME=... starts another run"
    evidence = "the checkpoint, and each key that differs with its value there and here"

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", table: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.table = table

    def lines(self) -> list[str]:
        """The error, and under it what the checkpoint and the run do not share, in two columns."""
        names, made = (max((len(_shortened(row[n])) for row in self.table), default=0) for n in (0, 1))
        rows = [tuple(map(_shortened, row)) for row in self.table]
        return [self.line(), *(f"  {name:<{names}}  {left:<{made}}  {right}" for name, left, right in rows)]


class EnvironmentProblem(SftPlayError):
    """The machine lacks something: a GPU, memory, disk, a port, a package, the network."""

    exit_code = ExitCode.ENVIRONMENT
    hint = "make install completes the environment"
    evidence = "what was looked for, where, and what the system answered"


class ModelUnreachableError(EnvironmentProblem):
    """A hub model that is neither on disk nor reachable, or gated."""

    hint = "give model.name a local folder, or check the network, the spelling and HF_TOKEN"
    evidence = "the model's name, and whether the hub refused it, failed, or could not be reached"


class DiskFullError(EnvironmentProblem):
    """Less disk is free than the run needs."""

    hint = "free space, or point run.output_dir to another disk"
    evidence = "the folder, GiB needed and GiB free"


class RunLockedError(EnvironmentProblem):
    """Another live process works in the same run folder."""

    hint = "wait for it, or give this one another RUN_NAME"
    evidence = "the run's folder and the id of the process that works there"


class OutOfMemoryError(EnvironmentProblem):
    """The device ran out of memory and nothing smaller is left to try."""

    hint = "lower TRAIN_BATCH_SIZE or MODEL_MAX_SEQ_LEN, or set tuning.mode: qlora"
    evidence = "the rank, what the device said, and the setting that needs less"


class GenerationMemoryError(EnvironmentProblem):
    """Generated answers do not fit beside the model, where the ranks hold parts of it and none can leave alone."""

    hint = "lower train.eval_batch_size or train.generation_max_new_tokens, or set train.predict_with_generate: false"
    evidence = "the rank, and what the device said"


class AppliedDiffersError(EnvironmentProblem):
    """The stack applied something else than what was planned."""

    hint = "run make install, then report this line with your config: it is a fault of this program"
    evidence = "what was planned and what is there"


class ResultDiffersError(EnvironmentProblem):
    """A merged or converted model does not compute what was trained; it was removed."""

    hint = "merge in fp32 (ARGS='--dtype fp32'), or state another bound if you accept the difference (--bound)"
    evidence = "the largest difference, the bound it passes, and on how many positions it was measured"


class PackedDiffersError(ConfigError):
    """Documents of one pack change each other in this model with this attention kernel."""

    hint = "train without packing: DATA_PACKING=false"
    evidence = "by how much the logits of packed and unpacked documents differ"


class NodesDifferError(ConfigError):
    """The processes of one run were told different things."""

    hint = "start every machine with the same config, data and version"
    evidence = "the first key that differs, its value here and on rank 0"


class LossNotFiniteError(SftPlayError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = ExitCode.NOT_FINITE
    hint = "lower train.learning_rate, or use bf16 instead of fp16"
    evidence = "the step, the rank, the numbers of its rows, and the loss or the first tensor with a bad gradient"


class RankFailedError(SftPlayError):
    """A worker process died or hung."""

    exit_code = ExitCode.RANK_FAILED
    hint = "its last lines are in run.log of the run folder"
    evidence = "the rank, how it ended (code or signal), and what the stack said last"


class Preempted(SftPlayError):
    """SIGTERM arrived and the state was saved."""

    exit_code = ExitCode.PREEMPTED
    hint = "the same command goes on from here"
    evidence = "the checkpoint that was saved"


class Interrupted(SftPlayError):
    """Ctrl-C arrived and the state was saved."""

    exit_code = ExitCode.INTERRUPTED
    hint = "the same command goes on from here"
    evidence = "the checkpoint that was saved"


def exit_code_of(error: SftPlayError) -> int:
    """The exit code of an error, also of several at once."""
    return int(error.code if isinstance(error, SeveralErrors) else error.exit_code)


def _flatten(error: SftPlayError) -> list[SftPlayError]:
    return error.errors if isinstance(error, SeveralErrors) else [error]


def _shortened(text: str) -> str:
    text = _one_line(text)
    return text if len(text) <= COLUMN_CHARACTERS else text[: COLUMN_CHARACTERS - 3] + "..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
