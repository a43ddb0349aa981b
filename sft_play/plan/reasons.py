"""Why a plan is what it is: a line for each value that was decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sft_play.plan.communication import gloo_warning
from sft_play.plan.derive import longest_row
from sft_play.plan.fast import choose_attention, choose_kernels, choose_loss, speed_reasons
from sft_play.plan.precision import choose_autocast, choose_dtype
from sft_play.plan.rate import rate_reason
from sft_play.plan.settings import Checkpointing, Placement
from sft_play.plan.strategy import Candidate

if TYPE_CHECKING:
    from sft_play.plan.build import PlanInputs


def reasons(inputs: PlanInputs, candidate: Candidate) -> tuple[str, ...]:
    """One line for each value that was decided here."""
    config, settings = inputs.config, candidate.settings
    asked = config.train.gradient_checkpointing
    on = settings.checkpointing is not Checkpointing.NONE
    if asked != "auto":
        checkpointing = "as configured"
    elif on:
        checkpointing = "without it this batch does not fit or is slower"
    else:
        checkpointing = "everything fits without recomputing"
    length = longest_row(config, inputs.data)
    slow = gloo_warning(config, inputs.hardware)
    return (
        f"strategy {candidate.layout.name}: {candidate.reason}",
        *_of_the_strategy(inputs, candidate),
        f"batch: {candidate.batch.arithmetic('packs' if settings.packed else 'rows')}",
        rate_reason(config, settings.global_batch),
        f"length {length} tokens: {_length_reason(inputs)}",
        choose_dtype(config, inputs.gpu)[1],
        choose_autocast(config, inputs.gpu)[1],
        f"gradient checkpointing {'on' if on else 'off'}: {checkpointing}",
        choose_loss(config, inputs.gpu)[1],
        choose_kernels(config, inputs.gpu, inputs.facts.model_type)[1],
        *speed_reasons(config),
        f"attention {choose_attention(config, inputs.gpu)}{_packed_attention(candidate)}",
        *([f"warning: {slow}"] if slow else []),
    )


def _of_the_strategy(inputs: PlanInputs, candidate: Candidate) -> Iterator[str]:
    """What a user of the strategy should know beside its figures."""
    if candidate.layout.placement is Placement.LAYER_SPLIT:
        yield "layer split saves memory and no time: the GPUs take turns, one works while the others wait"
    if inputs.hardware.unequal:
        yield "warning: the GPUs differ: the smallest sets the batch and the slowest the pace; DIST_GPUS=0,1 picks some"
    if inputs.gpu and not inputs.config.train.deterministic:
        yield "kernels are the fastest: two runs differ in the last bits; TRAIN_DETERMINISTIC=true makes them equal"


def _length_reason(inputs: PlanInputs) -> str:
    if inputs.data is None:
        return "model.max_seq_len; the data is not prepared yet"
    split = inputs.data.splits["train"]
    if not split.packs:
        return "the longest row"
    return f"{split.rows_kept:,} rows in {split.packs:,} packs, {split.fill or 0:.1%} of them real tokens"


def _packed_attention(candidate: Candidate) -> str:
    """How documents of a pack are told apart."""
    settings = candidate.settings
    if not settings.packed:
        return ""
    if settings.flattened:
        return ": the packs of a micro-batch in one row, documents by their lengths"
    return ": a row a pack, documents told apart by a mask of its own"
