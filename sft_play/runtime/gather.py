"""Whole weights out of shards: the one place that knows how each engine keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor


def gather_weights(model: torch.nn.Module, *, keep: bool, trained_only: bool) -> dict[str, torch.Tensor]:
    """Every weight whole, on the CPU, under the name that the unwrapped model gives it.

    A collective: all ranks call it. One weight at a time is whole on the device.

    Args:
        keep: whether this rank wants the result; the others only take part and get an empty mapping.
        trained_only: leave out what is frozen (the base under an adapter).
    """
    whole = {}
    for name, weight in model.named_parameters():
        if trained_only and not weight.requires_grad:
            continue
        with whole_weight(weight) as tensor:
            if keep:
                whole[name] = tensor.detach().to("cpu", copy=True)
    if keep and not trained_only:
        persistent = set(model.state_dict())
        whole |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in persistent}
    return whole


@contextlib.contextmanager
def whole_weight(weight: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """One weight whole on this rank, for as long as the block lasts. A collective."""
    if isinstance(weight, DTensor):  # FSDP2, hybrid shard, tensor parallel
        yield weight.full_tensor()
    elif hasattr(weight, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight
    else:
        yield weight
