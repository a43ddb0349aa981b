"""Kernels that replace parts of a model: put in place as planned, and looked for afterwards."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from trl.kernels import chunked_logprob

from sft_play.plan.build import Plan
from sft_play.runtime.full_loss import MARK, use_full_loss

# liger's fused losses would replace trl's; its layers are what is used.
LIGER_LAYERS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}


def set_loss(model: Any, plan: Plan, smoothing: float) -> None:
    """The loss that was planned: trl's tiles in Triton or in torch, or all logits at once.

    trl takes Triton wherever it can; tiles in torch are had by telling it that there is none. Before 1.16, which
    unsloth's environment has, it knows no other.
    """
    chunked_logprob._TRITON_AVAILABLE = triton_is_taken() and plan.loss == "fused"
    if plan.loss == "full":
        use_full_loss(model, smoothing)


def triton_is_taken() -> bool:
    """Whether trl's tiles are computed in Triton where the device has it."""
    return bool(getattr(chunked_logprob, "_TRITON_AVAILABLE", True))


def applied_loss(model: Any, device: torch.device) -> str:
    """`full`, `fused` or `chunked`, by what the model will do on this device; offloaded weights rest on another."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, MARK, False):
        return "full"
    uses_triton = getattr(chunked_logprob, "_use_triton", None)
    return "fused" if uses_triton is None or uses_triton(device) else "chunked"


def applied_kernels(model: torch.nn.Module) -> str:
    """`unsloth` or `liger` where a layer computes with it, `hub` where the hub's kernels are on, else `none`."""
    if any(_home(module.forward).startswith("unsloth") for module in model.modules()):
        return "unsloth"
    if any(_home(module.forward).startswith("liger_kernel") for module in model.modules()):
        return "liger"
    return "hub" if any(getattr(module, "_use_kernels", False) for module in model.modules()) else "none"


def _home(function: Any) -> str:
    """The module that a bound or plain function is written in."""
    return str(getattr(getattr(function, "__func__", function), "__module__", ""))


def use_fp8(model: torch.nn.Module, *, emulate: bool = False) -> int:
    """Let the decoder's linear layers multiply in fp8, scaled by tensor; returns how many do.

    Embedding and head stay as they are; so does a layer whose sides fp8 units cannot take (multiples of 16). Tokens
    are padded to such a multiple.

    Args:
        emulate: round to fp8 and multiply in fp32, for tests without such units.
    """
    float8 = import_module("torchao.float8")  # no dependency: only who asks for fp8 installs it

    def takes(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or "lm_head" in name:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    settings = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    float8.convert_to_float8_training(model, module_filter_fn=takes, config=settings)
    return fp8_layers(model)


def fp8_layers(model: torch.nn.Module) -> int:
    """Linear layers that multiply in fp8."""
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())
