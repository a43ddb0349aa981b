"""Exact batch arithmetic: micro-batch x gradient accumulation x data-parallel size = global batch, always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sft_play.errors import ConfigError

DEFAULT_GLOBAL_BATCH = 32
# A larger micro-batch must be worth its memory: the smallest within this of the best predicted speed is taken.
SPEED_TOLERANCE = 0.03
# More rows at once do not make a CPU faster, and cost memory.
ROWS_AT_UNKNOWN_SPEED = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one optimizer step."""

    micro_batch: int
    grad_accum: int
    data_parallel: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum * self.data_parallel

    def arithmetic(self, unit: str = "rows") -> str:
        """The product in words, for the plan."""
        return (
            f"{self.micro_batch} {unit} x {self.grad_accum} accumulated x {self.data_parallel} "
            f"data-parallel = {self.global_batch} {unit} a step"
        )


def default_global_batch(data_parallel: int) -> int:
    """32, or the next multiple of the data-parallel size where that does not divide 32."""
    return -(-DEFAULT_GLOBAL_BATCH // data_parallel) * data_parallel


def batch_options(global_batch: int, data_parallel: int) -> tuple[Batch, ...]:
    """Every exact split of a global batch, by rising micro-batch.

    Raises:
        ConfigError: the data-parallel size does not divide it; the nearest sizes that work are named.
    """
    if global_batch < 1 or data_parallel < 1:
        raise ConfigError(f"a global batch of {global_batch} over {data_parallel} ranks", where="train")
    if global_batch % data_parallel:
        below = global_batch // data_parallel * data_parallel
        near = f"{below} or {below + data_parallel}" if below else str(data_parallel)
        raise ConfigError(
            f"{global_batch} rows cannot be shared evenly by {data_parallel} data-parallel ranks",
            where="train.global_batch_size",
            fix=f"set it to {near}, or change dist.gpus",
        )
    rows = global_batch // data_parallel
    return tuple(
        Batch(micro_batch=micro, grad_accum=rows // micro, data_parallel=data_parallel)
        for micro in range(1, rows + 1)
        if rows % micro == 0
    )


def allowed_batches(
    *, micro_batch: int | None, grad_accum: int | None, global_batch: int | None, data_parallel: int
) -> tuple[Batch, ...]:
    """The splits that agree with what the config fixes; None stands for `auto`.

    Raises:
        ConfigError: the fixed values contradict each other or the data-parallel size.
    """
    if micro_batch and grad_accum:
        only = Batch(micro_batch=micro_batch, grad_accum=grad_accum, data_parallel=data_parallel)
        if global_batch and only.global_batch != global_batch:
            raise ConfigError(
                f"{only.arithmetic()}, but train.global_batch_size asks for {global_batch}",
                where="train",
                fix="leave one of train.batch_size, train.grad_accum and train.global_batch_size to auto",
            )
        return (only,)
    total = global_batch or _implied_global_batch(micro_batch, grad_accum, data_parallel)
    options = tuple(
        one
        for one in batch_options(total, data_parallel)
        if micro_batch in {None, one.micro_batch} and grad_accum in {None, one.grad_accum}
    )
    if not options:
        fixed = f"train.batch_size {micro_batch}" if micro_batch else f"train.grad_accum {grad_accum}"
        raise ConfigError(
            f"{fixed} does not divide {total} rows over {data_parallel} ranks",
            where="train.global_batch_size",
            fix=f"use a divisor of {total // data_parallel}",
        )
    return options


def _implied_global_batch(micro_batch: int | None, grad_accum: int | None, data_parallel: int) -> int:
    """The default, rounded up to a multiple of what is fixed."""
    unit = (micro_batch or grad_accum or 1) * data_parallel
    return -(-default_global_batch(data_parallel) // unit) * unit


def choose_batch(
    options: Sequence[Batch], *, fits: Callable[[Batch], bool], speed: Callable[[Batch], float]
) -> Batch | None:
    """The smallest micro-batch whose predicted speed is within 3% of the best that fits; None where none fits.

    Args:
        options: in any order.
        fits: whether the memory of one split fits; assumed to be monotonic in the micro-batch.
        speed: tokens a second; 0 where unknown (a CPU), and then the largest that fits, of at most 8 rows, is taken.
    """
    fitting = []
    for option in sorted(options, key=lambda one: one.micro_batch):
        if not fits(option):
            break
        fitting.append((speed(option), option))
    if not fitting:
        return None
    best = max(rate for rate, _ in fitting)
    if best <= 0:
        return max(
            (one for _, one in fitting if one.micro_batch <= ROWS_AT_UNKNOWN_SPEED), key=_rows, default=fitting[0][1]
        )
    return next(option for rate, option in fitting if rate >= best * (1 - SPEED_TOLERANCE))


def _rows(batch: Batch) -> int:
    return batch.micro_batch
