"""Whole weights out of shards and back: the one place that knows how each engine keeps them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from sft_play.errors import AppliedDiffersError


def gather_weights(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """What a run is for, whole and on the CPU, under the names of the files: the adapter, or every weight.

    A collective: all ranks call it. One weight at a time is whole on the device. On a CPU the tensors may be the
    model's own: they are to be written before it trains on.

    Args:
        model: unwrapped.
        keep: whether this rank wants the result; the others only take part and get an empty mapping.
    """
    names = file_names(model)
    whole: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if name in names:
            with whole_weight(weight) as tensor:
                if keep:
                    borrowed = hasattr(weight, "ds_id")  # whole only inside this block
                    whole[names[name]] = tensor.detach().to("cpu", copy=borrowed).contiguous()
    if keep and not isinstance(model, PeftModel):
        whole |= {name: buffer.detach().cpu() for name, buffer in persistent_buffers(model)}
    return whole


def write_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write gathered weights and the config beside them, as the model's library does."""
    if isinstance(model, PeftModel):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = copy.deepcopy(model.peft_config["default"])
        settings.inference_mode = True
        if isinstance(settings.target_modules, set):  # equal runs write equal files
            settings.target_modules = sorted(settings.target_modules)
        settings.save_pretrained(str(folder))
        return
    if getattr(model.config, "distributed_config", None) is not None:
        model.config.distributed_config = None  # the weights are whole; save_pretrained would gather them again
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)


def scatter_weights(model: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a checkpoint's safetensors files into the model, each rank taking its part.

    A collective under ZeRO-3; every rank reads the files.

    Raises:
        AppliedDiffersError: the files and the model name different weights.
    """
    where = weight_files(folder)
    names = file_names(model)
    targets = {names[name]: weight for name, weight in model.named_parameters() if name in names}
    if not isinstance(model, PeftModel):
        targets |= dict(persistent_buffers(model))
    lacking = sorted(set(targets) - set(where))
    unexpected = sorted(set(where) - set(targets) - {"lm_head.weight"})  # a tied head may be in the file or not
    if lacking or unexpected:
        raise AppliedDiffersError(f"weights do not match: {[*lacking, *unexpected][:3]}", where=str(folder))
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = {
            file: stack.enter_context(safe_open(str(file), framework="pt")) for file in sorted(set(where.values()))
        }
        for name, target in targets.items():
            put_weight(target, opened[where[name]].get_tensor(name))


def weight_files(folder: Path) -> dict[str, Path]:
    """Weight -> the safetensors file that holds it: the adapter's where there is one, else the model's."""
    adapter = folder / "adapter_model.safetensors"
    files = [adapter] if adapter.is_file() else sorted(folder.glob("model*.safetensors"))
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as weights:
            found |= dict.fromkeys(weights.keys(), file)
    return found


def file_names(model: torch.nn.Module) -> dict[str, str]:
    """Name of each weight that a run's result holds -> its name in the file; peft leaves the adapter's name out."""
    if not isinstance(model, PeftModel):
        return {name: name for name, _ in model.named_parameters()}
    marks = {name: torch.empty(0) for name, weight in model.named_parameters() if weight.requires_grad}
    kept = get_peft_model_state_dict(model, state_dict=dict(marks), save_embedding_layers=False)
    by_mark = {id(mark): name for name, mark in marks.items()}
    return {by_mark[id(mark)]: name for name, mark in kept.items()}


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that belong to a model's files."""
    kept: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        left_out: Any = module._non_persistent_buffers_set
        kept += [
            (f"{prefix}.{name}" if prefix else name, buffer)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in left_out
        ]
    return kept


@contextlib.contextmanager
def whole_weight(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """One weight whole on this rank, for as long as the block lasts. A collective."""
    if isinstance(weight, DTensor):  # FSDP2, hybrid shard, tensor parallel
        yield weight.full_tensor()
    elif hasattr(weight, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight
    else:
        yield weight


def put_weight(weight: torch.Tensor, whole: torch.Tensor) -> None:
    """Give a weight its part of `whole`, which every rank has."""
    if isinstance(weight, DTensor):
        placed = distribute_tensor(
            whole.to(weight.device, weight.dtype), weight.device_mesh, weight.placements, src_data_rank=None
        )
        weight.copy_(placed)
    elif hasattr(weight, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.copy_(whole)
    else:
        weight.copy_(whole)
