"""Memory that lasts: weights, adapters, gradients, optimizer state. One function a term, not yet divided."""

from __future__ import annotations

from sft_play.facts.shapes import Linear, ModelFacts
from sft_play.plan.settings import Dtype, Method, Optimizer, Settings

# bitsandbytes' NF4 (functional.quantize_4bit): half a byte a weight and one fp32 absmax per block of 64; double
# quantisation stores the absmax in 8 bits with one fp32 scale per 256 (Dettmers et al. 2023, "QLoRA", section 3).
NF4_BLOCK = 64
NF4_SECOND_BLOCK = 256
# bitsandbytes' 8-bit optimizers: one byte a moment and an fp32 absmax per 256 values (Dettmers et al. 2022).
EIGHT_BIT_BLOCK = 256


def quantized_bytes(weights: int, *, double: bool) -> float:
    """NF4 weights: n x (1/2 + 4/64) bytes, or n x (1/2 + 1/64 + 4/(64 x 256)) when double-quantised."""
    absmax = 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_SECOND_BLOCK) if double else 4 / NF4_BLOCK
    return weights * (0.5 + absmax)


def quantized_weights(facts: ModelFacts, settings: Settings) -> int:
    """Weights that are packed: the decoder's matrices, not embeddings, head, norms or biases."""
    if settings.method is not Method.QLORA:
        return 0
    return sum(one.count * one.weights for one in facts.linears if settings.quantize_experts or not one.expert)


def decoder_weight_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Weights of the decoder layers as they rest: NF4 where packed, `param_dtype` elsewhere."""
    packed = quantized_weights(facts, settings)
    plain = facts.linear_parameters + facts.norm_parameters - packed
    return quantized_bytes(packed, double=settings.double_quantized) + plain * settings.param_dtype.bytes


def outer_weight_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Embeddings, untied head and a vision tower, never packed."""
    outer = facts.embedding_parameters + facts.head_parameters + facts.other_parameters
    upcast = settings.upcast_outer and settings.method is Method.QLORA
    return float(outer * (4 if upcast else settings.param_dtype.bytes))


def adapted_linears(facts: ModelFacts, settings: Settings) -> tuple[Linear, ...]:
    """Linear layers that carry an adapter, by the end of their name."""
    if not settings.trains_adapter:
        return ()
    if settings.lora_targets == ("all-linear",):
        return tuple(one for one in facts.linears if one.name != "gate")
    return tuple(one for one in facts.linears if any(one.name.endswith(target) for target in settings.lora_targets))


def adapter_parameters(facts: ModelFacts, settings: Settings) -> int:
    """r x (in + out) for every adapted matrix (Hu et al. 2021, "LoRA"), and one magnitude an output under DoRA."""
    return sum(
        one.count * (settings.lora_r * (one.in_features + one.out_features) + settings.dora * one.out_features)
        for one in adapted_linears(facts, settings)
    )


def trained_parameters(facts: ModelFacts, settings: Settings) -> int:
    if settings.trains_adapter:
        return adapter_parameters(facts, settings)
    return facts.parameters


def trained_dtype(settings: Settings) -> Dtype:
    return settings.adapter_dtype if settings.trains_adapter else settings.param_dtype


def adapter_bytes(facts: ModelFacts, settings: Settings) -> int:
    return adapter_parameters(facts, settings) * settings.adapter_dtype.bytes


def gradient_bytes(facts: ModelFacts, settings: Settings) -> int:
    """One gradient a trained parameter, in the parameter's type; none rests where the step runs inside backward."""
    if settings.optimizer_in_backward:
        return 0
    return trained_parameters(facts, settings) * trained_dtype(settings).bytes


def largest_gradient_bytes(facts: ModelFacts, settings: Settings) -> int:
    """The one gradient that lives while its step runs inside backward: that of the embedding."""
    if not settings.optimizer_in_backward or settings.trains_adapter:
        return 0
    return facts.vocab_size * facts.hidden_size * settings.param_dtype.bytes


def optimizer_bytes(facts: ModelFacts, settings: Settings) -> float:
    """State on the GPU, master weights included; what is paged or offloaded is in `optimizer_host_bytes`."""
    if settings.optimizer in _PAGED or settings.offload.value != "none":
        return 0.0
    return _state_bytes(facts, settings)


def optimizer_host_bytes(facts: ModelFacts, settings: Settings) -> float:
    """State that lives in host memory because it is paged there or offloaded."""
    on_host = settings.optimizer in _PAGED or settings.offload.value != "none"
    return _state_bytes(facts, settings) if on_host else 0.0


def step_temporary_bytes(facts: ModelFacts, settings: Settings) -> float:
    """A foreach step's temporary: one value a trained parameter (measured: 10 bytes a parameter peak where 8 rest).

    A fused step and the 8-bit kernels have none; the non-foreach, non-fused loop one of the largest tensor.
    Source: torch.optim.adamw `_multi_tensor_adamw`, whose denominators are one list of all tensors.
    """
    if settings.optimizer_in_backward or settings.offload.value != "none":
        return 0.0
    if settings.foreach and settings.optimizer is Optimizer.ADAMW:
        return float(trained_parameters(facts, settings) * _state_dtype(settings).bytes)
    return 0.0


_PAGED = frozenset({Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT})


def _state_dtype(settings: Settings) -> Dtype:
    if settings.state_dtype is not None:
        return settings.state_dtype
    return Dtype.FP32 if settings.master_weights else trained_dtype(settings)


def _state_bytes(facts: ModelFacts, settings: Settings) -> float:
    trained = trained_parameters(facts, settings)
    master = 4 * trained if settings.master_weights else 0
    if settings.optimizer in {Optimizer.ADAMW, Optimizer.PAGED_ADAMW}:
        return master + 2.0 * trained * _state_dtype(settings).bytes
    if settings.optimizer in {Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT}:
        return master + _eight_bit_bytes(facts, settings, trained)
    if settings.optimizer is Optimizer.ADAFACTOR:
        return master + _factored_bytes(facts, settings)
    return float(master)  # plain SGD without momentum


def _eight_bit_bytes(facts: ModelFacts, settings: Settings, trained: int) -> float:
    """Two moments of one byte and their absmax; an embedding that is trained keeps fp32 moments.

    Source: bitsandbytes `Optimizer2State`, and transformers' Trainer, which registers `optim_bits: 32` for embeddings.
    """
    embedding = 0 if settings.trains_adapter else facts.vocab_size * facts.hidden_size
    return 2 * (trained - embedding) * (1 + 4 / EIGHT_BIT_BLOCK) + 8 * embedding


def _factored_bytes(facts: ModelFacts, settings: Settings) -> float:
    """One fp32 row sum and column sum a matrix (Shazeer and Stern 2018, "Adafactor"), full moments for vectors."""
    if settings.trains_adapter:
        rank = settings.lora_r
        shapes = adapted_linears(facts, settings)
        return 4.0 * sum(one.count * (one.in_features + one.out_features + 2 * rank) for one in shapes)
    matrices = sum(one.count * (one.in_features + one.out_features) for one in facts.linears)
    outer = (facts.vocab_size + facts.hidden_size) * (1 if facts.tied else 2)
    return 4.0 * (matrices + outer + facts.norm_parameters)
