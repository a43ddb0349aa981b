"""Seconds on the links between GPUs and to the host: collectives by strategy, and what of them nothing hides."""

from __future__ import annotations

from sft_play.facts.hardware import PCIE_BYTES_PER_SECOND, Gpu, Hardware, LinkKind
from sft_play.facts.shapes import ModelFacts
from sft_play.plan import rates, state
from sft_play.plan.settings import Checkpointing, Dtype, Method, Placement, Settings
from sft_play.plan.sharding import divisors, shards_weights


def exposed_seconds(facts: ModelFacts, settings: Settings, hardware: Hardware, compute: float) -> float:
    """Communication of a step that computation does not hide: of tensor parallel's nothing, each layer waits for it."""
    total = data_parallel_seconds(facts, settings, hardware)
    first_version = settings.placement in {Placement.FSDP, Placement.HSDP} and not settings.fsdp2
    overlap = rates.OVERLAP_FSDP1 if first_version else rates.OVERLAP
    hooks = rates.FSDP1_SECONDS_A_LAYER * facts.num_layers * settings.grad_accum if first_version else 0.0
    hidden = min(overlap * total, compute)
    return total - hidden + hooks + tensor_parallel_seconds(facts, settings, hardware)


def tensor_parallel_seconds(facts: ModelFacts, settings: Settings, hardware: Hardware) -> float:
    """Seconds in all-reduces of a step: two a layer and pass (Shoeybi et al. 2019, section 3), each of the activations.

    Passes: forward, backward, and the forward pass that recomputing repeats. A ring moves 2 x (n - 1) / n of the bytes.
    """
    ranks = tensor_parallel_ranks(settings)
    if ranks < 2:
        return 0.0
    passes = 2 + (settings.checkpointing is Checkpointing.FULL)
    activations = settings.tokens * facts.hidden_size * settings.compute_dtype.bytes
    moved = 2 * passes * facts.num_layers * 2 * activations * (ranks - 1) / ranks
    return settings.grad_accum * moved / _link(hardware, within=True)


def data_parallel_seconds(facts: ModelFacts, settings: Settings, hardware: Hardware) -> float:
    """Seconds in collectives between ranks that see different rows: a ring moves (n - 1) / n of what a GPU holds.

    DDP and ZeRO-1 reduce the gradients once a step, twice their bytes. ZeRO-2 keeps only its share of them and so
    scatters them in every micro-batch, and gathers the updated weights. FSDP and ZeRO-3 gather weights for forward
    and backward and scatter gradients in every micro-batch.
    """
    n = settings.data_parallel
    if n < 2:
        return 0.0
    tp = tensor_parallel_ranks(settings)
    gradients = state.trained_parameters(facts, settings) * _gradient_dtype(settings).bytes / tp
    ring = (n - 1) / n / _link(hardware, within=n * tp <= len(hardware.gpus))
    if shards_weights(settings):
        return settings.grad_accum * (2 * _gathered_weight_bytes(facts, settings) / tp + gradients) * ring
    scattered = settings.grad_accum if settings.placement is Placement.ZERO2 else 1
    return (scattered + 1) * gradients * ring


def gather_seconds(facts: ModelFacts, settings: Settings, hardware: Hardware) -> float:
    """Seconds to gather all weights once, as every pass under sharded weights does; 0 where each rank holds them."""
    if not shards_weights(settings):
        return 0.0
    tp, shards = tensor_parallel_ranks(settings), divisors(settings).weights
    moved = _gathered_weight_bytes(facts, settings) / tp * (shards - 1) / shards
    return moved / _link(hardware, within=shards <= len(hardware.gpus))


def tensor_parallel_ranks(settings: Settings) -> int:
    """Ranks that share each layer."""
    return settings.gpus if settings.placement is Placement.TP else settings.tensor_parallel


def _gradient_dtype(settings: Settings) -> Dtype:
    """The type in which gradients travel: under DDP the parameter's own, else the engine's, which is that of compute.

    Source: torch's reducer, whose buckets have the gradients' type; FSDP's mixed precision; DeepSpeed's
    `communication_data_type`, by default that of the engine.
    """
    return state.trained_dtype(settings) if settings.placement is Placement.DDP else settings.compute_dtype


def _gathered_weight_bytes(facts: ModelFacts, settings: Settings) -> float:
    if settings.method is Method.QLORA:
        return state.decoder_weight_bytes(facts, settings) + state.outer_weight_bytes(facts, settings)
    return float(facts.parameters * settings.compute_dtype.bytes)


def _link(hardware: Hardware, *, within: bool) -> float:
    """Bytes a second and GPU that a ring reaches; across machines all their network ports carry it together."""
    kind = "nvlink" if hardware.link is LinkKind.NVLINK else "pcie"
    if kind == "pcie" and any(gpu.family in rates.WITHOUT_PEER_ACCESS for gpu in hardware.gpus):
        kind = "pcie through host memory"
    inside = (hardware.link_bytes_per_second or 12e9) * rates.RING_EFFICIENCY[kind]
    if within or hardware.nodes == 1:
        return inside
    ports = hardware.network_bytes_per_second * max(1, len(hardware.gpus))
    return min(inside, ports * rates.RING_EFFICIENCY["network"])


def host_link(gpu: Gpu) -> float:
    """Bytes a second between a GPU and host memory, one direction."""
    return PCIE_BYTES_PER_SECOND.get(gpu.pcie_generation, 24e9)
