"""The proof before the first step that packed documents do not see each other, on the run's own packs.

Documents of a pack must come out of the model as they do alone. Kernels that lose the boundaries, and layers that
never look at positions, change them by half of their size or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sft_play.errors import PackedDiffersError
from sft_play.plan.build import Plan
from sft_play.runtime.collate import IGNORED, LENGTHS, REAL_TOKENS
from sft_play.runtime.trainer import SftPlayTrainer

# Size of the difference over the size of a document's hidden states. SmolLM2-135M over 24 chat rows, sdpa and eager:
# 2e-6 at most in fp32 and 0.02 in bf16; 0.5 at least where the boundaries are lost.
BOUND_FP32 = 1e-4
BOUND_ROUNDED = 0.06
PACKS = 2


class PackingCallback(TrainerCallback):
    """Proves the packs of the wrapped model once, before the first step. All ranks look at the same documents."""

    def __init__(self, trainer: SftPlayTrainer, plan: Plan) -> None:
        self.trainer, self.plan = trainer, plan
        self.difference: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        packs = packs_to_prove(self.trainer.train_dataset, self.plan.micro_batch)
        if not packs:
            print("packing: no pack holds two documents, so there is no boundary to prove")
            return
        self.difference = prove_packs(self.trainer, packs, self.plan)
        bound = bound_of(self.plan, self.trainer.args.tf32)
        print(
            f"packing: documents in a pack come out as alone, to {self.difference:.1e} of their size "
            f"({self.plan.attention}, bound {bound:g})"
        )


def packs_to_prove(rows: Dataset, micro_batch: int) -> list[dict[str, list[int]]]:
    """The first packs of two documents or more, as many as a micro-batch holds and two at most."""
    found = []
    for number, lengths in enumerate(rows.with_format("arrow")[LENGTHS]):
        if len(lengths) > 1:
            found.append(rows[number])
            if len(found) == min(PACKS, micro_batch):
                break
    return found


def bound_of(plan: Plan, tf32: bool | None) -> float:
    """The largest relative difference that rounding explains."""
    exact = plan.dtype == plan.autocast == "fp32" and not (tf32 and plan.device == "cuda")
    return BOUND_FP32 if exact else BOUND_ROUNDED


def prove_packs(trainer: SftPlayTrainer, packs: Sequence[Mapping[str, Any]], plan: Plan) -> float:
    """Compare the second and the last document of each pack with the same document alone.

    Returns:
        The largest relative difference of a document's last hidden states.

    Raises:
        PackedDiffersError: it is beyond rounding.
    """
    worst = 0.0
    with _observed(trainer) as states:
        together = states({**trainer.data_collator(list(packs))})
        for number, pack in enumerate(packs):
            lengths = pack[LENGTHS]
            row = together[number] if len(together) == len(packs) else _own_part(together[0], packs, number)
            for document in sorted({1, len(lengths) - 1}):
                start = sum(lengths[:document])
                after = start + lengths[document]
                alone = states({"input_ids": torch.tensor([pack["input_ids"][start:after]])})[0]
                worst = max(worst, relative_difference(row[start:after], alone))
    if not worst <= bound_of(plan, trainer.args.tf32):
        raise PackedDiffersError(
            f"packed documents see each other in {type(trainer.model).__name__} with attention {plan.attention}: "
            f"their hidden states differ by {worst:.2g} of their size from those of the documents alone",
            where="start of training",
        )
    return worst


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Size of the difference of two matrices over the size of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def _own_part(flat: torch.Tensor, packs: Sequence[Mapping[str, Any]], number: int) -> torch.Tensor:
    start = sum(len(pack["input_ids"]) for pack in packs[:number])
    return flat[start : start + len(packs[number]["input_ids"])]


@contextmanager
def _observed(trainer: SftPlayTrainer) -> Iterator[Any]:
    """A function from a batch to the wrapped model's last hidden states, in evaluation mode; all is put back after."""
    model, wrapped = trainer.accelerator.unwrap_model(trainer.model), trainer.model_wrapped
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    seen: list[torch.Tensor] = []
    hook = inner.base_model.register_forward_hook(lambda *call: seen.append(_last_state(call[-1])))
    modes = {module: module.training for module in wrapped.modules()}

    def states(batch: dict[str, Any]) -> torch.Tensor:
        batch.pop(REAL_TOKENS, None)
        # No label: the head is never asked for logits.
        batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
        batch = trainer._prepare_inputs(batch)
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
