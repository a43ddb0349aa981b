"""Constants of the libraries: what their losses, norms and layers keep, each with the measurement behind it.

Fitted per library and kernel, never per run or model. "fms" are the published benchmark tables of
foundation-model-stack/fms-acceleration (A100-80GB, HF Trainer); slopes are differences between two micro-batches of
one table, so that weights and state cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft_play.plan.settings import Kernels, Loss


@dataclass(frozen=True, kw_only=True)
class LossCost:
    """Bytes alive at the peak of the loss.

    Attributes:
        per_logit: bytes for each of tokens x vocabulary.
        copies: number of 16-bit copies of the logits where the loss never leaves 16 bits; 0: not applicable.
        per_hidden: bytes for each of tokens x hidden size.
        head_gradients: copies of the head's gradient, in the weight's type, held while chunks add to it.
        head_sums: fp32 sums of that gradient; where the weight is fp32 too they become the gradient.
        tile_tokens, tile_vocabulary: the part of the logits that is computed at a time, allocated whole.
        tile_backward, tile_forward: bytes for each logit of a tile that are made beside it.
    """

    per_logit: float
    copies: int
    per_hidden: float
    head_gradients: int = 0
    head_sums: int = 0
    tile_tokens: int = 0
    tile_vocabulary: int = 0
    tile_backward: int = 0
    tile_forward: int = 0


# HF eager, logits in fp32: 16-bit logits 2, fp32 logits 4, log-softmax 4, gradient 4, less what is freed on the way.
# fms slopes: llama-like 3B, 49k vocabulary 12 bytes; 7B, 32k vocabulary, older transformers 14. Taken: 12.5, nearer
# the newer.
# Without the upcast (GPT-2's descendants before transformers 4.46) four 16-bit copies: santacoder slope, to 0.3%.
_HF_FULL = LossCost(per_logit=12.5, copies=4, per_hidden=6)
# A cross entropy in Triton that writes its gradient over the logits: 8 bytes (3B; 7B and 8B with newer versions) to
# 10 (7B, older). Taken: 8.5, nearer the newer.
_TRITON_FULL = LossCost(per_logit=8.5, copies=3, per_hidden=5)
# Fused linear cross entropy: logits of a chunk of tokens x hidden / vocabulary only (liger_kernel
# fused_linear_cross_entropy: chunk logits 2 + 4 bytes a hidden value, and the gradient of the hidden states 2).
_FUSED = LossCost(per_logit=0, copies=0, per_hidden=8, head_gradients=1)
# torchtune CEWithChunkedOutputLoss: 16-bit logits of all chunks live, the fp32 copy of one in eight. 3B at 8,192
# tokens: 3.85 GiB beside the weights with full fine-tuning (two head gradients), 1.9 GiB with LoRA.
_TORCHTUNE_CHUNKED = LossCost(per_logit=2, copies=0, per_hidden=4, head_gradients=2)
# trl's fused head (kernels/chunked_logprob.py, 1.16): logits of one tile of 4,096 x 32,768; an fp32 gradient of the
# hidden states and, where it trains, of the head, and their 16-bit copies.
_TRL_CHUNKED = LossCost(
    per_logit=0, copies=0, per_hidden=10, head_gradients=1, head_sums=1, tile_tokens=4096, tile_vocabulary=32768
)
# The same head without Triton (`_backward_tile`, `_forward_tile` there): seven fp32 copies of a tile and a mask of a
# byte; three and a mask where nothing is learned.
_TRL_CHUNKED_IN_TORCH = replace(_TRL_CHUNKED, tile_backward=29, tile_forward=13)

LOSS_COSTS: dict[tuple[Kernels, Loss], LossCost] = {
    (Kernels.HF, Loss.FULL): _HF_FULL,
    (Kernels.HF, Loss.CHUNKED): _TRL_CHUNKED,
    (Kernels.HF, Loss.CHUNKED_IN_TORCH): _TRL_CHUNKED_IN_TORCH,
    (Kernels.HF, Loss.FUSED): _FUSED,
    (Kernels.TRITON, Loss.FULL): _TRITON_FULL,
    (Kernels.TRITON, Loss.CHUNKED): _TRL_CHUNKED,
    (Kernels.TRITON, Loss.CHUNKED_IN_TORCH): _TRL_CHUNKED_IN_TORCH,
    (Kernels.TRITON, Loss.FUSED): _FUSED,
    (Kernels.LIGER, Loss.FULL): _TRITON_FULL,
    (Kernels.LIGER, Loss.CHUNKED): _TRL_CHUNKED,
    (Kernels.LIGER, Loss.CHUNKED_IN_TORCH): _TRL_CHUNKED_IN_TORCH,
    (Kernels.LIGER, Loss.FUSED): _FUSED,
    (Kernels.UNSLOTH, Loss.FULL): _TRITON_FULL,
    (Kernels.UNSLOTH, Loss.CHUNKED): _TRL_CHUNKED,
    (Kernels.UNSLOTH, Loss.CHUNKED_IN_TORCH): _TRL_CHUNKED_IN_TORCH,
    (Kernels.UNSLOTH, Loss.FUSED): _FUSED,
    (Kernels.TORCHTUNE, Loss.FULL): _HF_FULL,
    (Kernels.TORCHTUNE, Loss.CHUNKED): _TORCHTUNE_CHUNKED,
    (Kernels.TORCHTUNE, Loss.FUSED): _FUSED,
    (Kernels.TORCHTITAN, Loss.FULL): _HF_FULL,
    (Kernels.TORCHTITAN, Loss.CHUNKED): _TORCHTUNE_CHUNKED,
    (Kernels.TORCHTITAN, Loss.FUSED): _FUSED,
}


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Activations of one layer, in widths of 16-bit values a token.

    Attributes:
        inner: MLP widths.
        hidden: hidden sizes, the attention's own tensors left out.
    """

    inner: float
    hidden: float


# Alive while one recomputed layer is differentiated, gated MLP: gate, up, their product's parts and the gradients of
# each: 6 inner widths, 7 where the MLP's weights train and keep their input. Hidden sizes from fms 7B slopes with
# fused loss: 246 KiB a token trained, 264 (QLoRA) to 272 (LoRA) frozen. Without a gate the MLP has half the tensors.
LIVE_TRAINED = LayerCost(inner=7, hidden=3.75)
LIVE_FROZEN = LayerCost(inner=6, hidden=6)
LIVE_TRAINED_UNGATED = LayerCost(inner=4, hidden=3.75)
LIVE_FROZEN_UNGATED = LayerCost(inner=3, hidden=6)

# Kept for the backward pass without checkpointing, counted from the tensors that transformers 5.23 saves: gate, up,
# activation and product (frozen: not the product); the input of each norm and, trained, of each group of matrices.
# torchtune's 3B at 130 KiB a token and layer agrees to 2%.
STORED_TRAINED = LayerCost(inner=4, hidden=4)
STORED_FROZEN = LayerCost(inner=3, hidden=2)
STORED_TRAINED_UNGATED = LayerCost(inner=2, hidden=4)
STORED_FROZEN_UNGATED = LayerCost(inner=1, hidden=2)
# An activation written in single operations keeps their results too (gelu_new of phi and gpt2, counted).
COMPOSED_ACTIVATION_INNER = 2.25
# Compiled layers recompute part of the pointwise products: torchtune 3B, compile on and off, 130 and 97 KiB.
COMPILED_INNER_SAVED = 0.5
# Selective checkpointing keeps every other product and the attention output: torchtitan 8B, two H100 tables.
STORED_SELECTIVE = LayerCost(inner=1, hidden=4)

# An eager RMSNorm keeps its input in fp32, and the normalised values where its weight trains; a fused one its input.
# Counted; while a layer is differentiated fms 7B and 3B show two hidden sizes a norm, trained or not.
EAGER_NORM_TRAINED = 2.0
EAGER_NORM_FROZEN = 1.0
EAGER_NORM_LIVE = 2.0
# What each norm of a stream that autocast left in fp32 keeps beyond that (simulated, tests/plan/test_simulation.py).
FP32_STREAM_NORM = 2.5
FUSED_NORMS = frozenset({Kernels.TRITON, Kernels.LIGER, Kernels.UNSLOTH, Kernels.TORCHTITAN})
# Rotated queries and keys, values and the output: two of each width.
ATTENTION_WIDTHS = 2.0
# Scores of eager attention, bytes a head and position: fp32 softmax 4 and its 16-bit copy 2 are kept (counted); while
# the layer is differentiated their gradients come on top.
EAGER_SCORE_BYTES_STORED = 6
EAGER_SCORE_BYTES_LIVE = 12
# An adapter keeps the input of each matrix it adapts, in 16 bits under autocast.
ADAPTER_INPUT_BYTES = 2


GIB = 1024**3
# Outside torch's allocator, from fms: CUDA context, cuBLAS workspaces and libraries; NCCL on 2 to 4 A100.
CONTEXT_BYTES = 0.7 * GIB
NCCL_BYTES = 1.5 * GIB
NCCL_BYTES_A_PEER = 0.2 * GIB
# Of stored activations and logits, after the allocator has freed its cache.
UNUSABLE_SHARE = 0.06


@dataclass(frozen=True, kw_only=True)
class CacheCost:
    """How badly a library's allocations share blocks.

    Attributes:
        rounding_share: of the activations, rounding and splitting; fused loss, 7B: 0.08 to 0.12.
        logits_share: of the smaller of logits and one layer at work, which keep blocks apart.
    """

    rounding_share: float
    logits_share: float


_EAGER_CACHE = CacheCost(rounding_share=0.1, logits_share=1.2)
# The in-place loss asks for one block of all logits; fms 7B with LoRA and QLoRA: 1.0 to 1.2, 3B 1.6.
_TRITON_CACHE = CacheCost(rounding_share=0.1, logits_share=1.2)
CACHE_COSTS = {
    Kernels.HF: _EAGER_CACHE,
    Kernels.TRITON: _TRITON_CACHE,
    Kernels.LIGER: _TRITON_CACHE,
    Kernels.UNSLOTH: _TRITON_CACHE,
    Kernels.TORCHTUNE: _EAGER_CACHE,
    Kernels.TORCHTITAN: _EAGER_CACHE,
}
