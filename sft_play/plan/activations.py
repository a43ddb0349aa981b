"""Memory that one micro-batch needs: checkpoints, the layer at work, logits. One function a term."""

from __future__ import annotations

from sft_play.facts.shapes import ModelFacts
from sft_play.plan import kernels
from sft_play.plan.dora import saved_outputs_bytes
from sft_play.plan.kernels import LOSS_COSTS, LayerCost, LossCost
from sft_play.plan.settings import Attention, Checkpointing, Dtype, Loss, Method, Offload, Placement, Settings
from sft_play.plan.sharding import divisors, shards_weights
from sft_play.plan.state import adapted_linears, decoder_weight_bytes


def stream_bytes(facts: ModelFacts, settings: Settings) -> int:
    """Bytes of one value of the residual stream.

    Four under QLoRA where fp32 norms make it fp32: after PEFT's preparation (which upcasts norms; under FSDP mixed
    precision casts them back), and for LayerNorm, which autocast runs in fp32 and whose type bitsandbytes' 4-bit
    layers hand on. fms: the slope of 7B rises by exactly one more checkpoint; every term of santacoder doubles.
    Four as well where fp32 weights train under autocast: embedding and norms answer in fp32, and residual sums of fp32
    and 16 bits are fp32 (simulated, tests/plan/test_simulation.py); FSDP's mixed precision casts them.
    """
    if settings.compute_dtype is Dtype.FP32 or autocasts_weights(settings):
        return 4
    if settings.method is Method.QLORA:
        if facts.layer_norm:
            return 4
        if settings.upcast and not shards_weights(settings):
            return 4
    return 2


def inside_bytes(facts: ModelFacts, settings: Settings) -> int:
    """Bytes of one value inside a layer and in the logits: autocast keeps them 16-bit under an fp32 stream.

    Not so for LayerNorm models under QLoRA, whose 4-bit layers hand fp32 on (see `stream_bytes`). fms 7B: the upcast
    adds one more checkpoint to the slope and nothing else.
    """
    if autocasts_weights(settings) or (settings.upcast and not facts.layer_norm):
        return 2
    return stream_bytes(facts, settings)


def autocasts_weights(settings: Settings) -> bool:
    """Whether fp32 weights train under autocast, which casts them where they are used."""
    kept_fp32 = settings.param_dtype is Dtype.FP32 and settings.compute_dtype is not Dtype.FP32
    return kept_fp32 and not settings.trains_adapter and not shards_weights(settings)


def checkpoint_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Input of every layer: layers x tokens x hidden (Chen et al. 2016; Korthikanti et al. 2022, section 5)."""
    layers = facts.num_layers / divisors(settings).depth
    if settings.offload_activations:
        layers = min(layers, 2)  # the layer at work and the one in flight
    sequence = settings.tensor_parallel if settings.sequence_parallel else 1
    return layers * settings.tokens * facts.hidden_size * stream_bytes(facts, settings) / sequence


def stored_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Activations that wait for the backward pass, all layers: checkpoints, or each layer's own tensors."""
    if settings.checkpointing is Checkpointing.FULL:
        return checkpoint_bytes(facts, settings)
    layers = facts.num_layers / divisors(settings).depth
    if settings.offload_activations:
        layers = min(layers, 2)
    return layers * settings.tokens * _layer_bytes_a_token(facts, settings, _stored_cost(facts, settings), live=False)


def live_layer_bytes(facts: ModelFacts, settings: Settings) -> float:
    """One layer while it is recomputed and differentiated; without checkpointing only what its gradients add."""
    cost = _live_cost(facts, settings)
    if settings.checkpointing is Checkpointing.FULL:
        return settings.tokens * _layer_bytes_a_token(facts, settings, cost, live=True)
    gradients = cost.inner / 2 * _inner_width(facts) + facts.hidden_size
    return settings.tokens * gradients * inside_bytes(facts, settings) / divisors(settings).layer


def masked_positions(facts: ModelFacts, settings: Settings) -> int:
    """Pairs of positions in the masks that one attention call is given; 0 where a kernel needs none.

    transformers 5.23 (`masking_utils`) makes rows x 1 x length x length for `sdpa` where a row is padded or as long
    as the model's window, for packed documents (where a micro-batch is flattened one square over all of them), and
    for `eager` always; flash and flex attention take lengths instead.
    """
    if settings.attention not in {Attention.SDPA, Attention.EAGER}:
        return 0
    padded = settings.packed or (settings.padded and settings.micro_batch > 1)
    windowed = facts.sliding_window is not None and settings.seq_len >= facts.sliding_window
    always = settings.attention is Attention.EAGER
    return settings.tokens * settings.span if padded or windowed or always else 0


def mask_bytes(facts: ModelFacts, settings: Settings, *, layers: float) -> float:
    """The model's attention masks, and what `layers` of its layers made of them.

    `eager` holds one mask in the stream's type. `sdpa` holds a boolean one, and a second for layers with a window;
    torch turns it into a bias of the query's type in every call (`convert_boolean_attn_mask`) and keeps that for the
    backward pass, so that without checkpointing every layer has its own (simulated, tests/plan/test_simulation.py).
    """
    pairs = masked_positions(facts, settings)
    if settings.attention is Attention.EAGER:
        return pairs * stream_bytes(facts, settings)
    kinds = 1 if facts.sliding_window is None else 2
    return pairs * (kinds + layers * inside_bytes(facts, settings))


def layers_with_masks(facts: ModelFacts, settings: Settings) -> float:
    """Layers whose own mask waits for the backward pass; none where they are recomputed."""
    if settings.checkpointing is not Checkpointing.NONE:
        return 0.0
    layers = facts.num_layers / divisors(settings).depth
    return min(layers, 2.0) if settings.offload_activations else layers


def recomputed_layer_bytes(facts: ModelFacts, settings: Settings) -> float:
    """One layer that has been computed again and not yet differentiated; nothing without checkpointing."""
    if settings.checkpointing is not Checkpointing.FULL:
        return 0.0
    cost = _stored_cost(facts, settings)
    return settings.tokens * _layer_bytes_a_token(facts, settings, cost, live=False)


def held_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Gradients of the layers' inputs that FSDP's first version keeps to the end of the backward pass.

    Its hooks for frozen parameters (`register_multi_grad_hook` on the inputs) hold every layer's input and the
    gradient of it; fms 7B and 8x7B, LoRA and QLoRA: layers - 2 more hidden states a token (240 KiB), none when full.
    """
    first_version = settings.placement in {Placement.FSDP, Placement.HSDP} and not settings.fsdp2
    if not (first_version and settings.trains_adapter and shards_weights(settings)):
        return 0.0
    if settings.checkpointing is not Checkpointing.FULL:
        return 0.0
    return (facts.num_layers - 2) * settings.tokens * facts.hidden_size * stream_bytes(facts, settings)


def logits_bytes(facts: ModelFacts, settings: Settings, *, tokens: int | None = None) -> float:
    """Logits and what the loss makes of them, by library and kind of loss.

    The head's gradient is whole wherever the head itself is: trl's chunked loss multiplies by the gathered weight
    (`full_tensor` under FSDP2 and tensor parallel, `GatheredParameters` under ZeRO-3; trainer/utils.py, 1.16), so its
    fp32 sums have the whole head's size on every GPU, and so has their copy in the gathered weight's type.
    """
    cost = LOSS_COSTS[settings.kernels, settings.loss]
    n = settings.tokens if tokens is None else tokens
    width = inside_bytes(facts, settings)
    per_logit = cost.per_logit
    if cost.copies and not settings.loss_upcast:
        per_logit = float(cost.copies * width)
    head = 0 if settings.trains_adapter else facts.vocab_size * facts.hidden_size * _head_gradient_width(cost, settings)
    made = min(facts.vocab_size, cost.tile_vocabulary) * cost.tile_backward
    tile = min(n, cost.tile_tokens) * (cost.tile_vocabulary * width + made)
    whole = n * (facts.vocab_size * per_logit + facts.hidden_size * cost.per_hidden * width / 2)
    head_share = 1 if cost.head_sums else divisors(settings).weights
    logits_share = 1 if cost.head_sums else divisors(settings).logits
    return whole / logits_share + head / head_share + tile


def _head_gradient_width(cost: LossCost, settings: Settings) -> int:
    """Bytes a weight of the head: fp32 sums, and their copy in the weight's type where that is another."""
    weight = settings.compute_dtype if cost.head_sums and shards_weights(settings) else settings.param_dtype
    if cost.head_sums and weight is Dtype.FP32:
        return 4 * cost.head_sums
    return 4 * cost.head_sums + cost.head_gradients * weight.bytes


def gathered_bytes(facts: ModelFacts, settings: Settings, *, layers: int = 1) -> float:
    """Weights gathered from the other shards: the outer ones, which stay, and `layers` decoder layers.

    fms, LoRA 7B and 8x7B on 2 and 4 GPUs: steady memory + outer weights + one layer, to 2%.
    """
    if not shards_weights(settings) and settings.offload is not Offload.PARAMS:
        return 0.0
    ahead = layers and layers + settings.prefetch
    width = settings.compute_dtype.bytes / settings.param_dtype.bytes
    outer = _gathered_outer_parameters(facts, settings, layers) * settings.compute_dtype.bytes
    decoder = decoder_weight_bytes(facts, settings) * (1 if settings.method is Method.QLORA else width)
    return (outer + ahead * decoder / facts.num_layers) / settings.tensor_parallel


def _gathered_outer_parameters(facts: ModelFacts, settings: Settings, layers: int) -> int:
    """FSDP's root keeps embedding and head gathered to the end; ZeRO-3 gathers each where it is used."""
    if settings.placement is Placement.ZERO3:
        return 0 if layers else facts.vocab_size * facts.hidden_size
    return facts.embedding_parameters + facts.head_parameters


def unsharded_gradient_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Gradient of one layer before it is reduced and scattered, under sharded weights."""
    if settings.trains_adapter or not shards_weights(settings):
        return 0.0
    return facts.layer_parameters * settings.compute_dtype.bytes / settings.tensor_parallel


def autocast_bytes(facts: ModelFacts, settings: Settings, *, backward: bool = False) -> float:
    """16-bit copies of fp32 weights that autocast makes (torch `cached_cast`).

    They live through the forward pass, and on into the backward pass where the graph keeps them; recomputing makes
    those of one layer again.
    """
    if not autocasts_weights(settings):
        return 0.0
    weights = facts.linear_parameters
    if backward and settings.checkpointing is Checkpointing.FULL:
        weights //= max(1, facts.num_layers)
    head = 0 if settings.loss is not Loss.FULL else facts.vocab_size * facts.hidden_size
    return (weights + head) * settings.compute_dtype.bytes / divisors(settings).weights


def _live_cost(facts: ModelFacts, settings: Settings) -> LayerCost:
    trained = not settings.trains_adapter
    if facts.gated_mlp:
        cost = kernels.LIVE_TRAINED if trained else kernels.LIVE_FROZEN
    else:
        cost = kernels.LIVE_TRAINED_UNGATED if trained else kernels.LIVE_FROZEN_UNGATED
    inner = cost.inner - (1 if settings.compile else 0) + _composed_inner(facts)
    return LayerCost(inner=inner, hidden=cost.hidden)


def _stored_cost(facts: ModelFacts, settings: Settings) -> LayerCost:
    if settings.checkpointing is Checkpointing.SELECTIVE:
        return kernels.STORED_SELECTIVE
    trained = not settings.trains_adapter
    if facts.gated_mlp:
        cost = kernels.STORED_TRAINED if trained else kernels.STORED_FROZEN
    else:
        cost = kernels.STORED_TRAINED_UNGATED if trained else kernels.STORED_FROZEN_UNGATED
    saved = kernels.COMPILED_INNER_SAVED if settings.compile else 0.0
    inner = max(1.0, cost.inner - saved + (0.0 if settings.compile else _composed_inner(facts)))
    return LayerCost(inner=inner, hidden=cost.hidden)


def _composed_inner(facts: ModelFacts) -> float:
    return kernels.COMPOSED_ACTIVATION_INNER if facts.composed_activation else 0.0


def _eager_norms(facts: ModelFacts, settings: Settings, *, live: bool) -> float:
    """Widths that one eager norm keeps beyond its 16-bit input; LayerNorm is one kernel everywhere."""
    if facts.layer_norm or settings.compile or settings.kernels in kernels.FUSED_NORMS:
        return 0.0
    if live:
        return kernels.EAGER_NORM_LIVE
    if settings.trains_adapter:
        return kernels.EAGER_NORM_FROZEN
    return kernels.EAGER_NORM_TRAINED + (1.0 if facts.fp32_norm_weights else 0.0)


def _layer_bytes_a_token(facts: ModelFacts, settings: Settings, cost: LayerCost, *, live: bool) -> float:
    """Bytes a token of one layer: MLP, hidden states and norms, attention, adapters' inputs, eager scores."""
    width = inside_bytes(facts, settings)
    selective = settings.checkpointing is Checkpointing.SELECTIVE
    eager = 0.0 if selective else _eager_norms(facts, settings, live=live)
    hidden = cost.hidden + (facts.norms_per_layer - 2) + eager * facts.norms_per_layer
    if autocasts_weights(settings) and not facts.layer_norm:
        hidden += 2 * (kernels.FP32_STREAM_NORM - (1.0 if facts.fp32_norm_weights else 0.0))
    heads = kernels.ATTENTION_WIDTHS + (1 + eager if facts.head_norms else 0.0)
    inside = cost.inner * _inner_width(facts) + heads * (facts.query_width + facts.kv_width)
    inside += _repeated_width(facts, settings)
    scores = 0.0
    if settings.attention is Attention.EAGER:
        each = kernels.EAGER_SCORE_BYTES_LIVE if live else kernels.EAGER_SCORE_BYTES_STORED
        scores = float(facts.num_heads * settings.span * each)
    sequence = settings.tensor_parallel if settings.sequence_parallel else 1
    adapters = _adapter_input_bytes(facts, settings) + saved_outputs_bytes(facts, settings, width)
    split = (inside * width + scores + adapters) / divisors(settings).layer
    return split + max(1.0, hidden) * facts.hidden_size * width / sequence


def _inner_width(facts: ModelFacts) -> float:
    """MLP width a token sees; all chosen experts of a mixture keep their tensors, one at a time is differentiated."""
    if not facts.experts:
        return facts.intermediate_size
    kept, differentiated = facts.active_experts, facts.active_experts / facts.experts
    return facts.intermediate_size * (kept + differentiated) / 2


def _repeated_width(facts: ModelFacts, settings: Settings) -> int:
    """Keys and values repeated for every query head, which `sdpa` with a mask keeps (`use_gqa_in_sdpa`)."""
    if settings.attention is not Attention.SDPA or not masked_positions(facts, settings) or facts.num_kv_heads == 1:
        return 0  # one head is repeated without a copy
    return 2 * (facts.query_width - facts.kv_width)


def _adapter_input_bytes(facts: ModelFacts, settings: Settings) -> float:
    inputs = sum(one.active * one.in_features for one in adapted_linears(facts, settings))
    return inputs / facts.num_layers * kernels.ADAPTER_INPUT_BYTES
