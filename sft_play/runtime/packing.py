"""The proof before the first step that packed documents do not see each other, on the run's own packs.

Documents of a pack must come out of the model as they do alone, and whatever stands beside them. Kernels that lose the
boundaries and layers that never look at positions (states, convolutions) make them differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sft_play.errors import PackedDiffersError
from sft_play.plan.build import Plan
from sft_play.runtime.collate import IGNORED, LENGTHS, REAL_TOKENS
from sft_play.runtime.job import Job
from sft_play.runtime.trainer import SftPlayTrainer

Pack = dict[str, Any]

# Documents alone against packed, size of the difference over size of the hidden states, for rounding depends on shapes.
# SmolLM2-135M, 24 chat rows, sdpa and eager: 3e-6 at most in fp32 and 0.04 in bf16; 0.5 where the boundaries are lost.
ALONE_FP32, ALONE_ROUNDED = 1e-4, 0.1
# The same beside other documents: with the shapes alike, only experts that get other tokens round otherwise.
NEIGHBOURS_FP32, NEIGHBOURS_ROUNDED = 1e-5, 0.03
# A short convolution lets only the first tokens of a document see the one before it.
FIRST_TOKENS = 4
PACKS = 2


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The largest relative differences found, of tested documents' last hidden states.

    Attributes:
        alone: packed against alone.
        neighbours: packed against packed with other documents beside them.
        exact: whether weights and products are fp32, so that the bounds are tight.
    """

    alone: float
    neighbours: float
    exact: bool

    @property
    def bounds(self) -> tuple[float, float]:
        """Of `alone` and `neighbours`."""
        return (ALONE_FP32, NEIGHBOURS_FP32) if self.exact else (ALONE_ROUNDED, NEIGHBOURS_ROUNDED)

    @property
    def holds(self) -> bool:
        """Whether rounding explains both; not so for NaN."""
        return self.alone <= self.bounds[0] and self.neighbours <= self.bounds[1]


class PackingCallback(TrainerCallback):
    """Proves the packs of the wrapped model once, before the first step. All ranks look at the same documents."""

    def __init__(self, trainer: SftPlayTrainer, job: Job) -> None:
        self.trainer, self.job, self.plan = trainer, job, job.plan

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        packs = packs_to_prove(self.job.first_rows(self.trainer.train_dataset), self.plan.micro_batch)
        if not packs:
            print("packing: no pack holds two documents, so there is no boundary to prove")
            return
        proof = prove_packs(self.trainer, packs, self.plan)
        print(
            f"packing: documents come out as alone, to {proof.alone:.0e} of their size (bound {proof.bounds[0]:g}), "
            f"whatever is beside them, to {proof.neighbours:.0e} (bound {proof.bounds[1]:g}); {self.plan.attention}"
        )


def packs_to_prove(rows: Dataset, micro_batch: int) -> list[Pack]:
    """The first packs of two documents or more, as many as a micro-batch holds and two at most."""
    counts = pc.list_value_length(rows.with_format("arrow")[LENGTHS][:])
    several = pc.indices_nonzero(pc.greater(counts, 1))
    return [rows[number] for number in several[: min(PACKS, micro_batch)].to_pylist()]


def prove_packs(trainer: SftPlayTrainer, packs: Sequence[Pack], plan: Plan) -> Proof:
    """Compare the second and the last document of each pack with the same alone, and beside other documents.

    Raises:
        PackedDiffersError: they differ beyond rounding.
    """
    alone, neighbours = 0.0, 0.0
    with _observed(trainer) as states:
        together = _by_pack(states(trainer.data_collator(packs)), packs)
        beside_others = _by_pack(states(trainer.data_collator([_with_other_documents(pack) for pack in packs])), packs)
        for pack, row, other_row in zip(packs, together, beside_others, strict=True):
            for start, after in _tested(pack):
                by_itself = states({"input_ids": torch.tensor([pack["input_ids"][start:after]])})[0]
                alone = worse(alone, relative_difference(row[start:after], by_itself))
                neighbours = worse(neighbours, relative_difference(other_row[start:after], row[start:after]))
    exact = plan.dtype == plan.autocast == "fp32" and not (plan.device == "cuda" and trainer.args.tf32)
    proof = Proof(alone=alone, neighbours=neighbours, exact=exact)
    if not proof.holds:
        raise PackedDiffersError(
            f"packed documents are not what they are alone: hidden states differ by {worse(alone, neighbours):.2g} of "
            f"their size, in {trainer.model.config.model_type} with attention {plan.attention}",
            where="start of training",
        )
    return proof


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Size of the difference of two documents over the size of the second: of its first tokens, or of all."""
    both = [(one.double(), other.double()), (one[:FIRST_TOKENS].double(), other[:FIRST_TOKENS].double())]
    whole, first = (float((a - b).norm() / b.norm()) for a, b in both)
    return worse(whole, first)


def worse(one: float, other: float) -> float:
    """The larger; NaN where either is."""
    return one if one >= other or math.isnan(one) else other


def _tested(pack: Pack) -> list[tuple[int, int]]:
    """Beginning and end of the second and the last document."""
    ends = [0, *accumulate(pack[LENGTHS])]
    last = len(ends) - 2
    return [(ends[number], ends[number + 1]) for number in sorted({1, last})]


def _with_other_documents(pack: Pack) -> Pack:
    """The pack with all but the tested documents written backwards."""
    ids = list(pack["input_ids"])
    tested = _tested(pack)
    for start, after in pairwise([0, *accumulate(pack[LENGTHS])]):
        if (start, after) not in tested:
            ids[start:after] = ids[start:after][::-1]
    return {**pack, "input_ids": ids}


def _by_pack(states: torch.Tensor, packs: Sequence[Pack]) -> list[torch.Tensor]:
    """One matrix a pack, whether they lay in rows of their own or all in one."""
    if len(states) == len(packs):
        return list(states)
    return list(states[0].split([len(pack["input_ids"]) for pack in packs]))


@contextmanager
def _observed(trainer: SftPlayTrainer) -> Iterator[Callable[[dict[str, Any]], torch.Tensor]]:
    """A function from a batch to the wrapped model's last hidden states, in evaluation mode; all is put back after."""
    model, wrapped = trainer.accelerator.unwrap_model(trainer.model), trainer.model_wrapped
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    seen: list[torch.Tensor] = []
    hook = inner.base_model.register_forward_hook(lambda *call: seen.append(_last_state(call[-1])))
    modes = {module: module.training for module in wrapped.modules()}

    def states(batch: dict[str, Any]) -> torch.Tensor:
        # Nothing to learn: the head has no part in this.
        labels = torch.full_like(batch["input_ids"], IGNORED)
        kept = {name: value for name, value in batch.items() if name != REAL_TOKENS}
        batch = trainer._prepare_inputs({**kept, "labels": labels})
        with torch.no_grad(), trainer.compute_loss_context_manager():
            wrapped(**batch, use_cache=False, fused_lm_head=True)
        return seen.pop()

    wrapped.eval()
    try:
        yield states
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
        if isinstance(wrapped, FSDPModule):
            wrapped.reshard()  # the root keeps its weights gathered until a backward pass


def _last_state(output: Any) -> torch.Tensor:
    state = output[0]
    return state.full_tensor() if isinstance(state, DTensor) else state
