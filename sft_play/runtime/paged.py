"""State of bitsandbytes' paged optimizers after it was loaded."""

from __future__ import annotations

from typing import Any

import torch

BUFFERS = ("state1", "state2")


def page_again(optimizer: torch.optim.Optimizer) -> int:
    """Put loaded state into buffers of the optimizer's own; returns how many were moved.

    A loaded buffer is an ordinary tensor. Where a rank loads straight onto its GPU it still says of itself that it is
    paged, and prefetching it ends in a CUDA error; elsewhere it would stay on the GPU for good, which is what paging
    was asked to avoid.
    """
    if not getattr(optimizer, "is_paged", False):
        return 0
    keeper: Any = optimizer
    moved = 0
    for weight, state in optimizer.state.items():
        for name in BUFFERS:
            loaded = state.get(name)
            if loaded is None:
                continue
            buffer = keeper.get_state_buffer(weight, dtype=loaded.dtype)
            buffer.copy_(loaded)
            state[name] = buffer
            moved += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return moved
