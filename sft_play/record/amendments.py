"""What a run changed of its plan while it lived, in amendments.json: a micro-batch or answers that did not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from sft_play.errors import DataError
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir, write_atomic


@dataclass(frozen=True, kw_only=True)
class SmallerBatch:
    """Rows that one GPU holds at once after memory ran out; the global batch and its order stay.

    Attributes:
        step: the optimizer step, from 1, in which it ran out; 0 where that is not known.
    """

    step: Annotated[int, Field(ge=0)]
    micro_batch: Annotated[int, Field(ge=1)]
    grad_accum: Annotated[int, Field(ge=1)]

    def words(self, before: int) -> str:
        """The change as it is said."""
        at = f" in step {self.step}" if self.step else ""
        return (
            f"out of memory{at}: micro-batch {before} -> {self.micro_batch}, {self.grad_accum} accumulated; "
            "the global batch and its order stay"
        )


@dataclass(frozen=True, kw_only=True)
class LossesOnly:
    """Evaluation that generates no more answers.

    Attributes:
        reason: why not.
    """

    reason: str


Amendment = SmallerBatch | LossesOnly
_LISTED = TypeAdapter(list[Amendment])


def smaller_micro_batch(micro_batch: int) -> int:
    """The largest divisor that is at most half; 0 for 1."""
    return next((size for size in range(micro_batch // 2, 0, -1) if micro_batch % size == 0), 0)


def append_amendment(run: RunDir, amendment: Amendment) -> None:
    """Write one down."""
    write_atomic(run.amendments, json.dumps([*map(asdict, read_amendments(run)), asdict(amendment)], indent=1) + "\n")


def read_amendments(run: RunDir) -> list[Amendment]:
    """All of a run, oldest first.

    Raises:
        DataError: the file is damaged.
    """
    if not run.amendments.is_file():
        return []
    try:
        found: list[Amendment] = _LISTED.validate_json(run.amendments.read_bytes(), strict=True)
    except ValidationError as error:
        what = f"the file is damaged: {error.errors()[0]['msg'].lower()}"
        fix = "move it away: the run begins again with what the plan says"
        raise DataError(what, where=str(run.amendments), fix=fix) from error
    return found


def amended(plan: Plan, amendments: Sequence[Amendment]) -> Plan:
    """The plan with the smallest micro-batch that was found to be needed, and without answers that did not fit."""
    sizes = [one.micro_batch for one in amendments if isinstance(one, SmallerBatch)]
    size = min([plan.micro_batch, *(size for size in sizes if plan.micro_batch % size == 0)])
    plan = replace(plan, micro_batch=size, grad_accum=plan.grad_accum * plan.micro_batch // size)
    reasons = [one.reason for one in amendments if isinstance(one, LossesOnly)]
    if reasons and plan.evaluation in ("generate", "sample"):
        plan = replace(plan, evaluation="loss", evaluation_reason=reasons[-1])
    return plan
