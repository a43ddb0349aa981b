"""FSDP2's communication: what `dist` asks of it, and when a trained head is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from sft_play.config.schema import Config
from sft_play.errors import AppliedDiffersError

# The first NCCL whose collectives run on copy engines.
COPY_ENGINE_NCCL = (2, 28)


class AllToAllReduceScatter(ReduceScatter):
    """A reduce-scatter as one all-to-all and a sum: each rank sends every other its part, and adds what it gets.

    The sum runs in the type of the gradients' buffer and in the ranks' order, so it is the same on every run.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` holds the parts of all ranks one after the other, each of `output_tensor`'s size.

        Raises:
            AppliedDiffersError: another reduction than a sum is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise AppliedDiffersError(f"dist.all_to_all_reduce sums and {op} is asked for", where="gradients")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), *output_tensor.shape), dim=0, out=output_tensor)


def gather_trained_head(model: torch.nn.Module) -> bool:
    """Have a trained output head whole before the loss reads its weight, whatever unit it lies in.

    The chunked loss takes the weight without calling the head. In a unit of its own it would then still lie in
    shards: trl gathers it there by itself, and each rank would keep its own gradient without adding the others'.

    Returns:
        Whether there is such a head.
    """
    unwrapped = model.get_base_model() if isinstance(model, PeftModel) else model
    heads = getattr(unwrapped, "get_output_embeddings", lambda: None)()
    if not isinstance(heads, FSDPModule) or not any(weight.requires_grad for weight in heads.parameters()):
        return False
    unit: FSDPModule = heads
    # After the wrapper's own hook, which has begun the forward pass; the end of the backward pass shards it again.
    model.register_forward_pre_hook(lambda *_: unit.unshard())
    return True


def apply_communication(model: torch.nn.Module, config: Config) -> list[str]:
    """Set what the config asks for on every sharded unit of a wrapped model; other engines are told by their files.

    Returns:
        The names of what was set, for the record.

    Raises:
        AppliedDiffersError: copy engines are asked for and this NCCL has none.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return []
    done = ["trained head gathered first"] if gather_trained_head(model) else []
    if config.dist.prefetch is True:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
        done.append("forward prefetch")
    if config.dist.all_to_all_reduce:
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_reduce_scatter(AllToAllReduceScatter())
        done.append("all-to-all reduce")
    if config.dist.copy_engine_all_gather:
        version = torch.cuda.nccl.version()
        if version[:2] < COPY_ENGINE_NCCL:
            raise AppliedDiffersError(
                f"copy engines need NCCL 2.28 and this is {'.'.join(map(str, version))}",
                where="dist.copy_engine_all_gather",
                fix="remove it",
            )
        for unit in units:
            unit.set_symm_mem_for_comm("NCCL")
        done.append("copy-engine all-gather")
    return done
