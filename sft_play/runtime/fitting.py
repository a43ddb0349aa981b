"""The net behind the plan: where a step of one process runs out of memory, it is redone in smaller micro-batches.

With several ranks the others wait inside a collective and cannot agree; the run ends there and its parent starts it
again from the last checkpoint with the smaller micro-batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sft_play.errors import OutOfMemoryError
from sft_play.record.amendments import SmallerBatch, append_amendment, smaller_micro_batch
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import append_event
from sft_play.runtime.collate import REAL_TOKENS

Inputs = Mapping[str, Any]


class Fitting:
    """Runs micro-batches at the size that fits.

    Args:
        drop_gradients: forget the gradients of the step.
        alone: whether this is the only process.
    """

    def __init__(self, run: RunDir, drop_gradients: Callable[[], None], *, alone: bool) -> None:
        self._run, self._drop_gradients, self._alone = run, drop_gradients, alone
        self._limit: int | None = None
        self._step = -1
        self._seen: list[dict[str, Any]] = []

    def train(
        self, step: int, inputs: Inputs, once: Callable[[Inputs], torch.Tensor], recount: Callable[[], None]
    ) -> torch.Tensor:
        """Train on one micro-batch, in parts where it does not fit; returns its share of the step's loss.

        Args:
            step: optimizer steps done; the micro-batches of one step are kept until the next begins.
            once: forward and backward of a micro-batch.
            recount: forget what was counted since this micro-batch began.

        Raises:
            OutOfMemoryError: a single row does not fit.
            torch.OutOfMemoryError: there are other ranks, or the micro-batch cannot be split.
        """
        if step != self._step:
            self._step, self._seen = step, []
        self._seen.append(dict(inputs))
        redo = False
        while True:
            try:
                for earlier in self._seen[:-1] if redo else ():
                    self._in_parts(earlier, once)
                recount()
                return self._in_parts(inputs, once)
            except torch.OutOfMemoryError as error:
                rows = self._limit or rows_of(inputs)
                if not self._alone or "cu_seq_lens_q" in inputs:  # packs flattened into one row cannot be split
                    raise
                if rows < 2:
                    raise self._nothing_smaller(inputs, error) from error
            # Outside of the handler: its traceback holds what has to be freed.
            self._shrink(rows)
            redo = True

    def _nothing_smaller(self, inputs: Inputs, error: torch.OutOfMemoryError) -> OutOfMemoryError:
        tokens = int(inputs["input_ids"].shape[1])
        what = f"a single row of {tokens:,} tokens does not fit ({str(error)[:160]})"
        return OutOfMemoryError(
            what,
            where=f"step {self._step + 1}",
            fix=f"MODEL_MAX_SEQ_LEN={max(1, tokens // 2)}, TRAIN_GRADIENT_CHECKPOINTING=true, or tuning.mode: qlora",
        )

    def _shrink(self, rows: int) -> None:
        self._limit = smaller_micro_batch(rows)
        self._drop_gradients()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parts = rows_of(self._seen[0]) // self._limit
        amendment = SmallerBatch(
            step=self._step + 1, micro_batch=self._limit, grad_accum=parts * max(1, len(self._seen))
        )
        append_amendment(self._run, amendment)
        told = f"out of memory in step {self._step + 1}: micro-batch {rows} -> {self._limit}; the step is redone"
        append_event(self._run.metrics, self._step + 1, "out_of_memory", told)
        print(told)

    def _in_parts(self, inputs: Inputs, once: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        if self._limit is None or rows_of(inputs) <= self._limit:
            return once(dict(inputs))
        losses = [once(part) for part in parts_of(inputs, self._limit)]
        return torch.stack(losses).sum()


def rows_of(inputs: Inputs) -> int:
    """Rows, or packs, of a micro-batch."""
    return int(inputs["input_ids"].shape[0])


def parts_of(inputs: Inputs, rows: int) -> Iterator[dict[str, Any]]:
    """The micro-batch in parts of so many rows; what is counted of the whole goes with the first."""
    total = rows_of(inputs)
    for start in range(0, total, rows):
        part = {
            key: value[start : start + rows] if value.dim() and value.shape[0] == total else value
            for key, value in inputs.items()
            if key != REAL_TOKENS
        }
        if REAL_TOKENS in inputs:
            part[REAL_TOKENS] = inputs[REAL_TOKENS] if start == 0 else torch.zeros_like(inputs[REAL_TOKENS])
        yield part
