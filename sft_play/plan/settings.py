"""What a run does to memory and time, as one value: the input of `estimate` and of `estimate_speed`.

Separate from Config, so that a published run of any library can be predicted as well as a run of this program.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Method(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Dtype(StrEnum):
    """Number types that weights, gradients and optimizer states come in."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        return 4 if self is Dtype.FP32 else 2


class Optimizer(StrEnum):
    """Optimizers by the state they keep."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    PAGED_ADAMW = "paged_adamw"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


class Checkpointing(StrEnum):
    """Activations kept for the backward pass: all, half of each layer's products, or one a layer."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Attention(StrEnum):
    """Attention kernels by what they keep: `eager` holds the scores, the others do not."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"
    FLEX = "flex"


class Loss(StrEnum):
    """How the loss holds its logits."""

    FULL = "full"
    # trl's head a tile at a time: in its Triton kernels, or in torch's operators, which copy a tile several times.
    CHUNKED = "chunked"
    CHUNKED_IN_TORCH = "chunked in torch"
    FUSED = "fused"


class Kernels(StrEnum):
    """Library whose loss and norm kernels run."""

    HF = "hf"
    TRITON = "triton"
    LIGER = "liger"
    UNSLOTH = "unsloth"
    TORCHTUNE = "torchtune"
    TORCHTITAN = "torchtitan"


class Placement(StrEnum):
    """How the model and its state lie on the GPUs."""

    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    TP = "tp"
    LAYER_SPLIT = "layer_split"


class Offload(StrEnum):
    """What lives in host memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's settings, resolved: nothing is automatic here.

    Attributes:
        micro_batch, seq_len: rows (or packs) a GPU holds in one forward pass, and their length in tokens.
        padded: rows differ in length, so that a micro-batch of several is padded to its longest.
        by_length: the rows of an optimizer step are of like length.
        packed: a sequence is several documents, told apart by their positions.
        flattened: packs of a micro-batch lie in one row, as varlen kernels need it; else in a row each.
        grad_accum: micro-batches an optimizer step; above 1 the gradients live through every forward pass.
        param_dtype: type in which weights rest; adapters have their own.
        compute_dtype: type of activations and gathered weights.
        master_weights: an fp32 copy beside 16-bit weights, kept with the optimizer state (DeepSpeed).
        state_dtype: type of the optimizer's moments; None: that of the weights they belong to.
        foreach: the step works on all tensors at once, with one temporary of their size; a fused step has none.
        optimizer_in_backward: each gradient is used and dropped at once.
        double_quantized, quantize_experts: of NF4; stacked experts cannot be packed by every loader.
        upcast: QLoRA preparation makes norms fp32, and with them the residual stream.
        upcast_outer: that preparation also holds embedding and head in fp32 (peft's own; the published runs do not).
        loss_upcast: logits become fp32 before the loss (all of transformers from 4.46 on).
        lora_targets: ends of module names, or `("all-linear",)`.
        dora: the adapter trains a magnitude for every output beside its direction.
        fp8: the decoder's linear layers multiply in fp8, forward and backward.
        gpus: of the whole run; `tensor_parallel` of them share each layer, `sharding_factor` each copy (None: all).
        sequence_parallel: the tensor-parallel ranks also share the tokens between their layers.
        fsdp2: FSDP in torch's second version, whose hooks hold no activations of frozen layers.
        nvme: what is offloaded goes on to a fast disk (ZeRO-3).
        prefetch: layers gathered ahead of the one that computes.
        expandable_segments: the allocator grows its blocks (PYTORCH_CUDA_ALLOC_CONF), so that none are wasted.
        eval_micro_batch: 0 where the run does not evaluate; generation needs `max_new_tokens` above 0.
        eval_seq_len: longest row that is evaluated; 0: as long as those of training.
    """

    method: Method
    micro_batch: int
    seq_len: int
    padded: bool = False
    packed: bool = False
    by_length: bool = False
    flattened: bool = False
    grad_accum: int = 1
    param_dtype: Dtype = Dtype.BF16
    compute_dtype: Dtype = Dtype.BF16
    adapter_dtype: Dtype = Dtype.FP32
    master_weights: bool = False
    double_quantized: bool = True
    quantize_experts: bool = True
    upcast: bool = False
    upcast_outer: bool = False
    loss_upcast: bool = True
    lora_r: int = 16
    lora_targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    state_dtype: Dtype | None = None
    foreach: bool = False
    optimizer_in_backward: bool = False
    checkpointing: Checkpointing = Checkpointing.FULL
    offload_activations: bool = False
    attention: Attention = Attention.SDPA
    loss: Loss = Loss.CHUNKED
    kernels: Kernels = Kernels.HF
    compile: bool = False
    fp8: bool = False
    placement: Placement = Placement.SINGLE
    gpus: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    sharding_factor: int | None = None
    fsdp2: bool = False
    offload: Offload = Offload.NONE
    nvme: bool = False
    prefetch: int = 0
    expandable_segments: bool = False
    eval_micro_batch: int = 0
    eval_seq_len: int = 0
    max_new_tokens: int = 0
    num_beams: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.micro_batch * self.seq_len

    @property
    def span(self) -> int:
        """Tokens of one row as attention gets it: of a sequence, or of a whole micro-batch that is flattened."""
        return self.tokens if self.flattened else self.seq_len

    @property
    def trains_adapter(self) -> bool:
        return self.method is not Method.FULL

    @property
    def data_parallel(self) -> int:
        """Ranks that see different rows."""
        if self.placement in {Placement.TP, Placement.LAYER_SPLIT, Placement.SINGLE}:
            return 1
        return max(1, self.gpus // self.tensor_parallel)

    @property
    def global_batch(self) -> int:
        """Rows an optimizer step."""
        return self.micro_batch * self.grad_accum * self.data_parallel
