"""Losses and gradients that are not finite: found before the optimizer step, and told with where they come from.

The loss of one rank makes the summed gradient, and so its norm, not finite on every rank: all of them see it after
the same step, and none has to be asked as long as all is well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft_play.errors import LossNotFiniteError
from sft_play.runtime.dist import Ranks

# Rows that an error names at most.
ROWS_NAMED = 32


class Finite:
    """Looks at one optimizer step at a time.

    Attributes:
        ranks: of the run; given once the trainer is built.
    """

    def __init__(self) -> None:
        self.ranks = Ranks()
        self._step = -1
        self._losses: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._names: list[str] = []
        self._norms: Iterable[torch.Tensor] = ()

    def add(self, step: int, loss: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Remember a micro-batch of the step: its loss, and the numbers of its rows."""
        if step != self._step:
            self._step, self._losses, self._norms = step, [], ()
        self._losses.append((loss, rows))

    def measure(self, model: torch.nn.Module) -> None:
        """Remember the norm of each gradient before clipping, which spreads a NaN to all of them. Nothing waits."""
        held = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
        self._names = [name.removeprefix("module.") for name, _ in held]
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for _, grad in held]
        self._norms = torch._foreach_norm(parts) if parts else ()

    def refuse(self, norm: float, *, scaled: bool) -> None:
        """Called on every rank once a norm is not finite.

        Args:
            scaled: fp16 with loss scaling: an infinite gradient of a finite loss is the scaler's business.

        Raises:
            LossNotFiniteError: naming the step, the rank, its rows and the first tensor.
        """
        found = self._everywhere(self._own())
        blamed = [(rank, one) for rank, one in enumerate(found) if one["loss"]]
        if scaled and not blamed:
            return
        if blamed:
            rank, one = blamed[0]
            at = f" on rank {rank}" if self.ranks.world_size > 1 else ""
            what = f"the loss is not finite{at}{_rows(one['rows'])}"
        else:
            # A backward pass begins at the last tensor, so that one is the first to be hit.
            worst = max(one["tensor"] for one in found)
            which = (
                f"the gradient of {self._names[worst]} is not finite" if worst >= 0 else f"the gradient norm is {norm}"
            )
            what = which + _rows([row for one in found for row in one["rows"]])
        raise LossNotFiniteError(f"{what}; stopped before the optimizer step", where=f"step {self._step + 1}")

    def _own(self) -> dict[str, Any]:
        """This rank's first loss that is not finite, the rows of it or else of the step, its last bad tensor."""
        losses = [(float(loss), rows) for loss, rows in self._losses]
        bad = [(loss, rows) for loss, rows in losses if not math.isfinite(loss)]
        tensors = [index for index, norm in enumerate(self._norms) if not math.isfinite(float(norm))]
        return {
            "loss": bool(bad),
            "rows": [int(row) for _, rows in (bad[:1] or losses) if rows is not None for row in rows if row >= 0],
            "tensor": max(tensors, default=-1),
        }

    def _everywhere(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        if self.ranks.world_size == 1:
            return [own]
        found: list[Any] = [None] * self.ranks.world_size
        torch.distributed.all_gather_object(found, own, group=self.ranks.control)
        return found


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The loss to the bit; one that is not finite with a gradient that is not finite either."""
    return loss * (1 + 0 * loss.detach())


def _rows(rows: list[int]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
    return f" (prepared rows {', '.join(map(str, rows[:ROWS_NAMED]))}{more}, from 0)"
