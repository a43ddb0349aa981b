"""The one table of what each strategy divides by what.

Sources: Rajbhandari et al. 2020, "ZeRO", section 5 and figure 1 (stages 1 to 3); Zhao et al. 2023, "PyTorch FSDP"
(full and hybrid sharding); Shoeybi et al. 2019, "Megatron-LM" (tensor parallel). Activations are sharded by none of
the data-parallel strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.plan.settings import Placement, Settings


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """Ways in which each kind of memory is divided on one GPU.

    Attributes:
        weights, gradients, optimizer: of the model's own state.
        layer: activations inside a layer (tensor parallel splits heads and the inner MLP width).
        depth: layers a GPU holds, as a share of all (layer split).
        logits: vocabulary of the logits.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    layer: int = 1
    depth: int = 1
    logits: int = 1


def divisors(settings: Settings) -> Divisors:
    """The row of the table for these settings, with the number of GPUs filled in."""
    tp = settings.tensor_parallel
    n = max(1, settings.gpus // tp)
    shards = min(n, settings.sharding_factor or n)
    every = settings.gpus
    table = {
        Placement.SINGLE: Divisors(),
        Placement.DDP: Divisors(weights=tp, gradients=tp, optimizer=tp, layer=tp, logits=tp),
        Placement.ZERO1: Divisors(weights=tp, gradients=tp, optimizer=tp * n, layer=tp, logits=tp),
        Placement.ZERO2: Divisors(weights=tp, gradients=tp * n, optimizer=tp * n, layer=tp, logits=tp),
        Placement.ZERO3: Divisors(weights=tp * n, gradients=tp * n, optimizer=tp * n, layer=tp, logits=tp),
        Placement.FSDP: Divisors(weights=tp * n, gradients=tp * n, optimizer=tp * n, layer=tp, logits=tp),
        Placement.HSDP: Divisors(
            weights=tp * shards, gradients=tp * shards, optimizer=tp * shards, layer=tp, logits=tp
        ),
        Placement.TP: Divisors(weights=every, gradients=every, optimizer=every, layer=every, logits=every),
        Placement.LAYER_SPLIT: Divisors(weights=every, gradients=every, optimizer=every, depth=every),
    }
    return table[settings.placement]


def shards_weights(settings: Settings) -> bool:
    """Whether a layer's weights have to be gathered from other GPUs before it can compute."""
    gathering = settings.placement in {Placement.FSDP, Placement.ZERO3, Placement.HSDP}
    return gathering and divisors(settings).weights > settings.tensor_parallel


def reduces_gradients(settings: Settings) -> bool:
    """Whether gradients travel between data-parallel ranks."""
    return settings.data_parallel > 1
