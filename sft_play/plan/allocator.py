"""From live tensors to what nvidia-smi shows: cached blocks, CUDA context, NCCL."""

from __future__ import annotations

import math

from sft_play.facts.shapes import ModelFacts
from sft_play.plan import activations as act
from sft_play.plan.kernels import CACHE_COSTS, CONTEXT_BYTES, NCCL_BYTES, NCCL_BYTES_A_PEER, UNUSABLE_SHARE
from sft_play.plan.settings import Settings
from sft_play.plan.sharding import shards_weights


def context_bytes(settings: Settings) -> int:
    """CUDA context, libraries, and NCCL's buffers with more than one GPU: outside torch's allocator."""
    return round(CONTEXT_BYTES + nccl_bytes(settings.gpus))


def nccl_bytes(gpus: int) -> float:
    """Communicators and their channels' buffers: more with more peers in the machine."""
    return NCCL_BYTES + min(gpus, 8) * NCCL_BYTES_A_PEER if gpus > 1 else 0.0


def reserved_bytes(facts: ModelFacts, settings: Settings, *, allocated: int, resting: int, step: int) -> int:
    """What the caching allocator takes, given room: blocks of one phase that another cannot use come on top.

    Four causes, each visible in the difference between nvidia-smi and peak allocated of the fms tables:
    rounding and splitting (a tenth of the activations); blocks of logits that no layer fits and the reverse (the
    smaller of the two again); activations and the optimizer's temporaries (both again, until the activations are so
    large that the step fits into their blocks); layers in flight on another stream under sharded weights.
    """
    cost = CACHE_COSTS[settings.kernels]
    logits, layer = act.logits_bytes(facts, settings), act.live_layer_bytes(facts, settings)
    stored, held = act.stored_bytes(facts, settings), act.held_bytes(facts, settings)
    activations = stored + max(logits, layer + held)
    if settings.expandable_segments:
        return round(allocated + cost.rounding_share / 2 * activations)
    apart = stored + max(logits, held) + layer - activations + (cost.logits_share - 1) * min(logits, layer)
    step_apart = step_apart_bytes(activations, step)
    both = apart + step_apart if shards_weights(settings) else max(apart, step_apart)
    peak = max(allocated, resting + max(activations, step) + both)
    return round(peak + cost.rounding_share * activations + in_flight_bytes(facts, settings))


def step_apart_bytes(activations: float, step: float) -> float:
    """Part of the optimizer step's memory that finds no freed activation block.

    All of it (or of the activations) while those are smaller; falls with the square root of step / activations.
    fms full fine-tuning: 1.0 at equal size, 0.83 at 1.5 times, 0.56 to 0.71 at twice.
    """
    if activations <= 0 or step <= 0:
        return 0.0
    return min(activations, step * min(1.0, math.sqrt(step / activations)))


def in_flight_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Two more layers in 16 bits, and their gradients where they train: FSDP's rate limiter lets two gathers fly.

    Source: torch.distributed.fsdp `limit_all_gathers`; fms 8x7B, whose layers are 2.7 GiB, shows it best.
    """
    if not shards_weights(settings):
        return 0.0
    layer = facts.layer_parameters * settings.compute_dtype.bytes / settings.tensor_parallel
    return 2 * layer * (1 if settings.trains_adapter else 2)


def unusable_bytes(facts: ModelFacts, settings: Settings) -> int:
    """What stays unusable even after the allocator has given its cache back: split blocks."""
    activations = act.stored_bytes(facts, settings) + act.logits_bytes(facts, settings)
    return round(UNUSABLE_SHARE * activations / (3 if settings.expandable_segments else 1))
