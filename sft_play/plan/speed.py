"""`estimate_speed`: seconds of one optimizer step, tokens a second and MFU, from FLOPs, bytes and links.

The formula stands beside every MFU: `Speed.formula`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft_play.facts.hardware import Gpu, Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan import rates, state
from sft_play.plan.activations import (
    autocasts_weights,
    inside_bytes,
    masked_positions,
    stored_bytes,
    stream_bytes,
)
from sft_play.plan.dora import output_traffic, weight_norm_seconds
from sft_play.plan.kernels import LOSS_COSTS
from sft_play.plan.links import exposed_seconds, host_link, tensor_parallel_ranks
from sft_play.plan.nvme import nvme_seconds
from sft_play.plan.settings import (
    Attention,
    Checkpointing,
    Kernels,
    Loss,
    Method,
    Offload,
    Optimizer,
    Settings,
)
from sft_play.plan.sharding import divisors


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted time of one optimizer step.

    Attributes:
        tokens_per_second_per_gpu, tokens_per_second: training tokens, padding included.
        model_flops_per_token: without recomputation, what MFU counts.
        mfu: model FLOPs over the GPUs' dense 16-bit rate; 0 where that is unknown.
        parts: seconds of a step by cause.
    """

    step_seconds: float
    tokens_per_second_per_gpu: float
    tokens_per_second: float
    model_flops_per_token: float
    mfu: float
    formula: str
    parts: dict[str, float]


def estimate_speed(facts: ModelFacts, settings: Settings, hardware: Hardware) -> Speed | None:
    """Speed on this hardware; None where a GPU's rates are unknown or there is none."""
    if not hardware.gpus or any(not gpu.flops or not gpu.bandwidth for gpu in hardware.gpus):
        return None
    gpu = min(hardware.gpus, key=lambda one: one.flops)
    parts = _step_parts(facts, settings, gpu)
    compute = sum(parts.values())
    parts["communication not hidden"] = exposed_seconds(facts, settings, hardware, compute)
    parts["activation transfers"] = activation_transfer_seconds(facts, settings, gpu, compute)
    parts["optimizer step"] = optimizer_seconds(facts, settings, gpu)
    parts["NVMe"] = nvme_seconds(facts, settings, hardware)
    seconds = sum(parts.values())
    tokens = settings.tokens * settings.grad_accum * settings.data_parallel
    flops = model_flops_per_token(facts, settings)
    rate = tokens / seconds
    return Speed(
        step_seconds=seconds,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / settings.gpus,
        model_flops_per_token=flops,
        mfu=rate * flops / (settings.gpus * gpu.flops),
        formula=flops_formula(settings),
        parts=parts,
    )


def flops_formula(settings: Settings) -> str:
    """The FLOPs that MFU counts, in words; N are the weights that multiply a token."""
    weights = "4N + 6 adapter weights" if settings.trains_adapter else "6N"
    return f"{weights} + 6 x layers x length x query width (causal attention), recomputation not counted"


def model_flops_per_token(facts: ModelFacts, settings: Settings) -> float:
    """Forward and backward FLOPs of a token: 6 a trained weight, 4 a frozen one (no weight gradient), and attention.

    Source: Kaplan et al. 2020, section 2.1; N holds the output head and no embedding lookup, and of a mixture the
    experts in use.
    """
    return _linear_flops(facts, settings) + attention_flops(facts, settings)


def _linear_flops(facts: ModelFacts, settings: Settings) -> float:
    if settings.trains_adapter:
        return 4.0 * facts.matmul_parameters + 6.0 * state.adapter_parameters(facts, settings)
    return 6.0 * facts.matmul_parameters


def recompute_flops_per_token(facts: ModelFacts, settings: Settings) -> float:
    """Second forward pass of the decoder under checkpointing, 2 a weight; the head runs once."""
    if settings.checkpointing is Checkpointing.NONE:
        return 0.0
    share = 1.0 if settings.checkpointing is Checkpointing.FULL else 0.25
    decoder = facts.matmul_parameters - facts.hidden_size * facts.vocab_size
    return share * 2.0 * decoder


def attention_flops(facts: ModelFacts, settings: Settings) -> float:
    """Causal scores and values, forward and backward: 6 x layers x span x query width a token.

    2 products x 2 FLOPs x half the span (causal), three times for forward and backward (Dao et al. 2022, appendix).
    """
    span = min(settings.seq_len, 2 * (facts.sliding_window or settings.seq_len))
    return 6.0 * facts.num_layers * span * facts.query_width


def efficiency_of(gpu: Gpu) -> rates.Efficiency:
    return rates.EFFICIENCY.get(gpu.family, rates.UNKNOWN_EFFICIENCY)


def _step_parts(facts: ModelFacts, settings: Settings, gpu: Gpu) -> dict[str, float]:
    """Seconds of all micro-batches of a step on one GPU, by cause, without communication."""
    split = tensor_parallel_ranks(settings)
    share = settings.tokens * settings.grad_accum / split
    compute = {
        "matrix products": share * (matmul_seconds(facts, settings, gpu) + _whole_head_seconds(facts, settings, gpu)),
        "attention": share * attention_seconds(facts, settings, gpu),
        "pointwise kernels": share * pointwise_seconds(facts, settings, gpu),
        "adapters": share * adapter_seconds(facts, settings, gpu),
        "dequantisation": settings.grad_accum * dequantise_seconds(facts, settings, gpu),
        "weight norms": settings.grad_accum * weight_norm_seconds(facts, settings, gpu, efficiency_of(gpu)),
    }
    return {**compute, "launches": launch_seconds(facts, settings, sum(compute.values()))}


def _passes(settings: Settings) -> float:
    """Forward passes a backward pass is worth: forward 1, backward 2, recomputation 1."""
    return (
        3.0 + {Checkpointing.FULL: 1.0, Checkpointing.SELECTIVE: 0.5, Checkpointing.NONE: 0.0}[settings.checkpointing]
    )


def matmul_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a token, large matrix products at the family's efficiency."""
    fill = facts.hidden_size / (facts.hidden_size + rates.SMALL_MATRIX_HIDDEN)
    flops = _linear_flops(facts, settings) + recompute_flops_per_token(facts, settings)
    if settings.fp8:
        flops -= (1 - rates.FP8_MATMUL) * max(0.0, flops - 6.0 * facts.hidden_size * facts.vocab_size)
    seconds = flops / (gpu.flops * efficiency_of(gpu).matmul * fill)
    return seconds + _fp32_head_seconds(facts, settings, gpu)


def _whole_head_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """What the head costs more, times the ranks that share the rest, where a loss gathers it whole on each of them.

    Source: trl's chunked loss (trainer/utils.py, 1.16), which takes `full_tensor` of a head split by tensor parallel.
    """
    ranks = tensor_parallel_ranks(settings)
    if not LOSS_COSTS[settings.kernels, settings.loss].head_sums:
        return 0.0
    flops = (4 if settings.trains_adapter else 6) * facts.hidden_size * facts.vocab_size
    return (ranks - 1) * flops / (gpu.flops * efficiency_of(gpu).matmul)


def _fp32_head_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a token that the output head costs more where QLoRA preparation made the hidden states fp32."""
    if not settings.upcast or stream_bytes(facts, settings) == 2:
        return 0.0
    efficiency = efficiency_of(gpu)
    return 4.0 * facts.hidden_size * facts.vocab_size / (gpu.flops * efficiency.fp32 * 0.9)


def attention_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a token; eager attention computes the masked half too and moves its scores through memory.

    So does torch's own kernel where it is given a mask: only its causal form leaves tiles out. Of a flattened
    micro-batch that is the square over all its documents. Kernels that take lengths are given the square of a whole
    sequence too, which is more than they do: documents are shorter.
    """
    flops = attention_flops(facts, settings)
    if settings.checkpointing is Checkpointing.FULL:
        flops *= 4 / 3
    efficiency = efficiency_of(gpu)
    if masked_positions(facts, settings):
        flops *= settings.span / settings.seq_len
    if settings.attention is Attention.SDPA and masked_positions(facts, settings):
        flops *= 2
    if settings.attention is not Attention.EAGER:
        return flops / (gpu.flops * efficiency.attention)
    moved = facts.num_layers * facts.num_heads * settings.seq_len * 30.0
    return 2 * flops / (gpu.flops * efficiency.matmul) + moved / (gpu.bandwidth * efficiency.bandwidth)


def pointwise_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a token of norms, rotary embedding, activation, residual and loss: bytes over bandwidth.

    Under autocast the residual stream of fp32 weights is fp32, and the MLP's inner width 16-bit (`inside_bytes`).
    """
    factor = rates.POINTWISE[settings.kernels]
    if settings.compile:
        factor = min(factor, rates.COMPILED_POINTWISE)
    experts = max(1, facts.active_experts)
    stream = stream_bytes(facts, settings)
    inside = inside_bytes(facts, settings) if autocasts_weights(settings) else stream
    layer = stream * 4 * facts.hidden_size + inside * 3 * facts.intermediate_size * experts
    traffic = rates.LOGIT_TRAFFIC[settings.kernels]
    if settings.loss is not Loss.FULL or settings.compile:
        traffic = rates.LOGIT_TRAFFIC[Kernels.LIGER]
    moved = factor * _passes(settings) * facts.num_layers * layer + traffic * facts.vocab_size
    return moved / (gpu.bandwidth * efficiency_of(gpu).bandwidth)


def adapter_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a token of adapters: passes over every adapted matrix' input and output."""
    widths = sum(one.active * (one.in_features + one.out_features) for one in state.adapted_linears(facts, settings))
    traffic = rates.ADAPTER_TRAFFIC * settings.adapter_dtype.bytes / 4 / (2 if settings.compile else 1)
    moved = traffic * (_passes(settings) - 1) * widths + output_traffic(facts, settings) * _passes(settings)
    return moved / (gpu.bandwidth * efficiency_of(gpu).bandwidth)


def dequantise_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds a micro-batch: every packed weight is unpacked in each pass over its layer."""
    passes = 2 + (settings.checkpointing is Checkpointing.FULL)
    moved = state.quantized_weights(facts, settings) * rates.DEQUANTISE_TRAFFIC * passes
    return moved / (gpu.bandwidth * efficiency_of(gpu).bandwidth)


def activation_transfer_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu, compute: float) -> float:
    """Seconds of a step that offloaded activations need on their way out and back beyond the work beside it."""
    if not settings.offload_activations:
        return 0.0
    kept = stored_bytes(facts, replace(settings, offload_activations=False))
    return max(0.0, 2 * settings.grad_accum * kept / host_link(gpu) - rates.OVERLAP * compute)


def launch_seconds(facts: ModelFacts, settings: Settings, compute: float) -> float:
    """What the host's launches exceed the GPU's work by, small batches only."""
    host = facts.num_layers * _passes(settings) * rates.LAUNCH_SECONDS_A_LAYER * settings.grad_accum
    if settings.method is not Method.FULL:
        host *= 1.5
    return max(0.0, host - compute)


def optimizer_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """Seconds of one update: bytes moved over bandwidth, or over the host link where the state is offloaded."""
    trained = state.trained_parameters(facts, settings) / divisors(settings).optimizer
    width = state.trained_dtype(settings).bytes / 2
    foreach = settings.foreach and settings.optimizer is Optimizer.ADAMW
    traffic = (rates.STEP_TRAFFIC_FOREACH if foreach else rates.STEP_TRAFFIC_FUSED) * width
    seconds = trained * traffic / (gpu.bandwidth * efficiency_of(gpu).bandwidth)
    host = state.optimizer_host_bytes(facts, settings) / divisors(settings).optimizer
    if host:
        seconds += 2 * host / host_link(gpu) * (1 - rates.OVERLAP if settings.optimizer_in_backward else 1)
    if settings.offload is Offload.PARAMS:
        weights = state.decoder_weight_bytes(facts, settings) / divisors(settings).weights
        seconds += 3 * settings.grad_accum * weights / host_link(gpu)
    return seconds
