"""What a run changed of its plan while it lived, in amendments.json: a micro-batch that turned out too large."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir, write_atomic


@dataclass(frozen=True, kw_only=True)
class SmallerBatch:
    """Rows that one GPU holds at once after memory ran out; the global batch and its order stay.

    Attributes:
        step: the optimizer step, from 1, in which it ran out; 0 where that is not known.
    """

    step: int
    micro_batch: int
    grad_accum: int

    def words(self, before: int) -> str:
        """The change as it is said."""
        at = f" in step {self.step}" if self.step else ""
        return (
            f"out of memory{at}: micro-batch {before} -> {self.micro_batch}, {self.grad_accum} accumulated; "
            "the global batch and its order stay"
        )


def smaller_micro_batch(micro_batch: int) -> int:
    """The largest divisor that is at most half; 0 for 1."""
    return next((size for size in range(micro_batch // 2, 0, -1) if micro_batch % size == 0), 0)


def append_amendment(run: RunDir, amendment: SmallerBatch) -> None:
    """Write one down."""
    write_atomic(run.amendments, json.dumps([*map(asdict, read_amendments(run)), asdict(amendment)], indent=1) + "\n")


def read_amendments(run: RunDir) -> list[SmallerBatch]:
    """All of a run, oldest first."""
    if not run.amendments.is_file():
        return []
    return [SmallerBatch(**values) for values in json.loads(run.amendments.read_text(encoding="utf-8"))]


def amended(plan: Plan, amendments: list[SmallerBatch]) -> Plan:
    """The plan with the smallest micro-batch that was found to be needed; never a larger one than planned."""
    sizes = [one.micro_batch for one in amendments if plan.micro_batch % one.micro_batch == 0]
    size = min([plan.micro_batch, *sizes])
    return replace(plan, micro_batch=size, grad_accum=plan.grad_accum * plan.micro_batch // size)
