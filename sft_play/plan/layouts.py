"""The ways to lay a run over the GPUs, and why one of them cannot run on a machine or is pointless there."""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.facts.hardware import Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.settings import Method, Offload, Optimizer, Placement, Settings

# The simplest first.
ORDER = (
    Placement.SINGLE, Placement.DDP, Placement.ZERO1, Placement.ZERO2, Placement.FSDP, Placement.ZERO3,
    Placement.HSDP, Placement.TP, Placement.LAYER_SPLIT,
)  # fmt: skip
# Where every rank, or the one process, keeps the optimizer state of whole weights.
_WHOLE_STATE = frozenset({Placement.SINGLE, Placement.DDP, Placement.LAYER_SPLIT})
_BITSANDBYTES = frozenset({Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT})
_COMPILES = frozenset({Placement.SINGLE, Placement.DDP, Placement.FSDP, Placement.HSDP})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One strategy with its offload.

    Attributes:
        sharding_factor: ranks that share one copy of the weights under `hsdp`; None for those of one machine.
    """

    placement: Placement
    offload: Offload = Offload.NONE
    sharding_factor: int | None = None

    @property
    def name(self) -> str:
        plain = self.placement.value
        return plain if self.offload is Offload.NONE else f"{plain} + {self.offload.value} offload"


def layouts() -> tuple[Layout, ...]:
    """All layouts, the simplest first; offload after everything that stays on the GPU."""
    return (
        *(Layout(placement=placement) for placement in ORDER),
        Layout(placement=Placement.ZERO2, offload=Offload.OPTIMIZER),
        Layout(placement=Placement.ZERO3, offload=Offload.OPTIMIZER),
        Layout(placement=Placement.ZERO3, offload=Offload.PARAMS),
        Layout(placement=Placement.FSDP, offload=Offload.PARAMS),
    )


def why_illegal(facts: ModelFacts, base: Settings, hardware: Hardware, layout: Layout) -> str:
    """Why a layout is not offered here: it cannot run, or another does the same with less; empty where it is."""
    return why_impossible(facts, base, hardware, layout) or _why_pointless(base, hardware, layout)


def why_impossible(facts: ModelFacts, base: Settings, hardware: Hardware, layout: Layout) -> str:
    """Why a layout cannot run at all here, even where the config forces it; empty where it can."""
    ranks, placement = hardware.world_size, layout.placement
    one = "GPU" if hardware.gpus else "process"
    if placement is Placement.SINGLE:
        return "" if ranks == 1 else f"would leave {ranks - 1} of {ranks} {one}s idle".replace("processs", "processes")
    if placement is Placement.LAYER_SPLIT and not hardware.gpus:
        return "needs GPUs"
    if base.optimizer is Optimizer.ADAFACTOR and placement not in _WHOLE_STATE:
        return "shards the optimizer, and adafactor's factors are made from whole weights: take an AdamW"
    if base.optimizer in _BITSANDBYTES and placement in {Placement.FSDP, Placement.HSDP, Placement.TP}:
        return "keeps weights as sharded tensors, which bitsandbytes' optimizers cannot step: take an AdamW of torch"
    if why := _why_not_fast(base, layout):
        return why
    if placement in {Placement.FSDP, Placement.HSDP} and layout.offload is not Offload.NONE and not hardware.gpus:
        return "needs a GPU: torch offloads from one, and everything is in host memory already"
    if placement in {Placement.ZERO2, Placement.ZERO3} and layout.offload is not Offload.NONE:
        return ""
    if ranks < 2:
        return "needs two GPUs or more"
    if placement is Placement.HSDP:
        return _why_no_hybrid(base, hardware, layout)
    if placement is Placement.TP:
        return _why_no_tensor_parallel(facts, base, hardware)
    if placement is Placement.LAYER_SPLIT and (hardware.nodes > 1 or facts.num_layers < ranks):
        return "needs one machine with no more GPUs than layers"
    return ""


def _why_not_fast(base: Settings, layout: Layout) -> str:
    """Placements that compiled layers, fp8 and offloaded activations are not made for."""
    if base.compile and layout.placement not in _COMPILES:
        return "hooks its layers where torch.compile cannot follow"
    if base.fp8 and layout.placement not in _COMPILES:
        return "places weights in ways that fp8 layers do not know"
    if base.offload_activations and layout.placement is Placement.LAYER_SPLIT:
        return "spreads activations over the GPUs, and offloading follows one"
    return ""


def _why_pointless(base: Settings, hardware: Hardware, layout: Layout) -> str:
    placement = layout.placement
    if not hardware.gpus and layout.offload is not Offload.NONE:
        return "everything is in host memory already"
    if layout.offload is Offload.OPTIMIZER and base.method is not Method.FULL:
        return "an adapter's optimizer state is too small to be worth moving"
    if placement is Placement.ZERO3 and layout.offload is Offload.PARAMS and base.method is Method.QLORA:
        return "ZeRO-3 loads 4-bit weights whole on every GPU first"
    if placement is Placement.HSDP and hardware.nodes < 2 and layout.sharding_factor is None:
        return "the same as fsdp on one machine"
    return ""


def _why_no_hybrid(base: Settings, hardware: Hardware, layout: Layout) -> str:
    ranks, shards = hardware.world_size, hybrid_shards(hardware, layout)
    if shards > 1 and (ranks % shards or ranks == shards) and (hardware.nodes > 1 or layout.sharding_factor):
        return f"needs two copies or more of the weights: {ranks} ranks do not divide into several groups of {shards}"
    return ""


def hybrid_shards(hardware: Hardware, layout: Layout) -> int:
    """Ranks that share one copy of the weights: as asked, else those of one machine, which its fast links join."""
    return layout.sharding_factor or len(hardware.gpus) or hardware.cpu_processes


def _why_no_tensor_parallel(facts: ModelFacts, base: Settings, hardware: Hardware) -> str:
    if hardware.nodes > 1:
        return "every layer would wait for the network between machines"
    if base.method is not Method.FULL:
        return "adapters and 4-bit layers cannot be split by transformers' tensor-parallel plans"
    if facts.num_kv_heads % hardware.world_size or facts.num_heads % hardware.world_size:
        return f"{facts.num_kv_heads} key-value heads do not divide by {hardware.world_size} GPUs"
    return ""
