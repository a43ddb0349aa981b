"""`train.torch_compile`: the decoder's layers compiled in place, each by the same code.

The whole model is not: trl's loss and the engines' hooks live around the layers and would break it into pieces. In
place means that no wrapper appears, so that sharding, saving and resuming see the model as ever. Shapes are taken to
vary from the first step on: a run that was resumed then computes with the same kernels as the straight one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The repeated blocks of a transformers model, adapters or not."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def compile_layers(model: torch.nn.Module) -> None:
    """Compile every decoder layer at its first call."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def compiled_layers(model: Any) -> int:
    """How many decoder layers run compiled."""
    return sum(layer._compiled_call_impl is not None for layer in decoder_layers(model))
