"""Which engine has which knob of communication and offload, and why the others cannot be asked for it.

| key | FSDP2, hybrid shard | DeepSpeed ZeRO | DDP, tensor parallel |
|---|---|---|---|
| prefetch: true | explicit forward prefetch | stage 3 gathers ahead anyway | no weights are gathered |
| prefetch: false | the backward pass always gathers ahead | stage 3: prefetch bucket of 0 | no weights are gathered |
| all_to_all_reduce | a reduce-scatter of our own | only with 4-bit gradients | an all-reduce |
| copy_engine_all_gather | symmetric memory, NCCL without CTAs | buffers are not symmetric | nothing is gathered |
| copy_engine_send_recv | NCCL's peer-to-peer copies, NCCL_P2P_USE_CUDA_MEMCPY | the same | the same |

Sources: torch 2.13, `FSDPModule.set_modules_to_forward_prefetch`, `set_custom_reduce_scatter`, `set_symm_mem_for_comm`
(the last two exclude each other); DeepSpeed 0.19 `runtime/zero/config.py`, where `zero_quantized_gradients` is the only
reduction by all-to-all; NCCL from 2.28 for copy-engine collectives (NCCL_CTA_POLICY=2), `src/transport/p2p.cc` for the
peer-to-peer copies. No figure of this program has been measured with the last three keys on.
"""

from __future__ import annotations

from sft_play.config.schema import Config
from sft_play.facts.hardware import Hardware
from sft_play.plan.layouts import Layout, hybrid_shards
from sft_play.plan.settings import Offload, Placement

FSDP = (Placement.FSDP, Placement.HSDP)
ZERO = (Placement.ZERO1, Placement.ZERO2, Placement.ZERO3)
ALONE = (Placement.SINGLE, Placement.LAYER_SPLIT)
NO_GATHER = "gathers no weights"


def why_no_knob(config: Config, layout: Layout) -> tuple[str, str]:
    """(key, reason) of the first key of `dist` that a layout's engine cannot honour; empty where there is none."""
    dist, placement = config.dist, layout.placement
    asked = {
        "dist.prefetch": _why_no_prefetch(placement, dist.prefetch),
        "dist.all_to_all_reduce": _why_no_all_to_all(placement) if dist.all_to_all_reduce else "",
        "dist.copy_engine_all_gather": _why_no_copy_engine_gather(placement) if dist.copy_engine_all_gather else "",
        "dist.copy_engine_send_recv": _why_no_send(placement) if dist.copy_engine_send_recv else "",
        "dist.cpu_offload": _why_no_offload(layout),
        "dist.nvme_path": "offloads to no disk" if dist.nvme_path and placement is not Placement.ZERO3 else "",
    }
    return next(((key, f"{layout.name} {why}") for key, why in asked.items() if why), ("", ""))


def _why_no_prefetch(placement: Placement, asked: bool | str) -> str:
    if asked == "auto" or placement is Placement.ZERO3 or (placement in FSDP and asked is True):
        return ""
    return "always gathers ahead in its backward pass" if placement in FSDP else NO_GATHER


def _why_no_all_to_all(placement: Placement) -> str:
    if placement in FSDP:
        return ""
    if placement in ZERO:
        return "reduces by all-to-all only with gradients rounded to 4 bits (zero_quantized_gradients), another curve"
    return "reduces its gradients by all-reduce" if placement is Placement.DDP else "reduces no gradients between ranks"


def _why_no_copy_engine_gather(placement: Placement) -> str:
    if placement in FSDP:
        return ""
    return "gathers into memory that NCCL cannot copy between GPUs by itself" if placement in ZERO else NO_GATHER


def _why_no_send(placement: Placement) -> str:
    return "is one process and sends nothing" if placement in ALONE else ""


def _why_no_offload(layout: Layout) -> str:
    """Layouts carry their offload in their name: `fsdp + optimizer offload`."""
    if layout.offload is Offload.OPTIMIZER and layout.placement in FSDP:
        return "is not possible: FSDP2 moves weights, gradients and optimizer state together (use cpu_offload: params)"
    if layout.offload is Offload.OPTIMIZER and layout.placement not in ZERO:
        return "is not possible: only DeepSpeed moves the optimizer alone"
    if layout.offload is Offload.PARAMS and layout.placement not in (*FSDP, Placement.ZERO3):
        return "is not possible: weights can be moved only where they are sharded"
    return ""


def why_no_device(config: Config, layout: Layout, hardware: Hardware) -> tuple[str, str]:
    """(key, reason) of the first key of `dist` that this machine cannot honour under a layout."""
    dist = config.dist
    nccl = bool(hardware.gpus) and dist.sync_backend != "gloo"
    for key, asked in (
        ("dist.copy_engine_all_gather", dist.copy_engine_all_gather),
        ("dist.copy_engine_send_recv", dist.copy_engine_send_recv),
    ):
        if asked and not nccl:
            return key, "copy engines are driven by NCCL, which needs GPUs and dist.sync_backend other than gloo"
    shards = hybrid_shards(hardware, layout) if layout.placement is Placement.HSDP else hardware.world_size
    if dist.copy_engine_all_gather and shards > len(hardware.gpus):
        return (
            "dist.copy_engine_all_gather",
            "copy engines reach the GPUs of one machine; use dist.strategy: hsdp there",
        )
    return "", ""


def gloo_warning(config: Config, hardware: Hardware) -> str:
    """What gloo between GPUs costs; empty where it is not used there."""
    if config.dist.sync_backend != "gloo" or not hardware.gpus or hardware.world_size < 2:
        return ""
    return (
        "gloo between GPUs passes everything through host memory and is many times slower than NCCL: for a broken NCCL"
    )
