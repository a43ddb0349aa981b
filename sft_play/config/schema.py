"""The config: six frozen sections, every key with its type, default and meaning.

The docstring under a field is its documentation: the reference page, the JSON Schema for editors and
`make config KEY=...` are all made from it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class TuningMode(StrEnum):
    """What is trained: an adapter over a 4-bit base, an adapter over a 16-bit base, or everything."""

    QLORA = "qlora"
    LORA = "lora"
    FULL = "full"


class Strategy(StrEnum):
    """How the model and its optimizer state are laid over the GPUs."""

    AUTO = "auto"
    SINGLE = "single"
    DDP = "ddp"
    FSDP = "fsdp"
    HSDP = "hsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    TP = "tp"
    LAYER_SPLIT = "layer_split"


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected here, not true or false")
    return value


_Number = BeforeValidator(_refuse_boolean)
Count = Annotated[int, _Number, Field(ge=1)]
NonNegativeInt = Annotated[int, _Number, Field(ge=0)]
Positive = Annotated[float, _Number, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, _Number, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, _Number, Field(ge=0, lt=1)]
Auto = Literal["auto"]


class Section(BaseModel):
    """A frozen group of keys that refuses unknown ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    """The base model and how it is loaded."""

    name: str
    """Local folder or hub id of the base model."""
    revision: str | None = None
    """Commit, tag or branch of a hub model; a full commit hash pins it. A local folder has none."""
    max_seq_len: Count = 2048
    """Longest row in tokens; `data.on_overlong` says what happens to longer ones."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of the base's weights. `auto`: 16 bits under an adapter; fp32 for full fine-tuning, which takes no other."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = "auto"
    """Attention kernel. `auto`: torch's own (sdpa); flash_attention_2 and 3 need their package, 3 a Hopper GPU."""
    kernels: Literal["auto", "none", "liger", "hub"] = "auto"
    """Library of fused kernels for norms, rotary embedding and MLP. `auto`: liger where it is installed for the GPU and
    knows the architecture, else none; `hub`: kernels of the hub through the `kernels` package."""
    chat_template: str | None = None
    """Chat template: a file, or a built-in name; by default the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Needs `model.revision` pinned to a commit."""


class LoraSection(Section):
    """The adapter's shape."""

    r: Count = 16
    """Rank of the two adapter matrices."""
    alpha: Positive = 32.0
    """Numerator of the adapter's scale: alpha / r, or alpha / sqrt(r) with `use_rslora`."""
    dropout: Share = 0.0
    """Dropout on the adapter's input while training."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, by the end of their name."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r), which keeps large ranks stable."""
    use_dora: bool = False
    """Train the weights' magnitude apart from their direction (DoRA)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole and saved beside the adapter, such as `embed_tokens` and `lm_head`."""


class QuantizationSection(Section):
    """How the frozen base is quantised under `tuning.mode: qlora`."""

    type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type of bitsandbytes."""
    double: bool = True
    """Quantise the quantisation constants too, which saves about 0.4 bit a parameter."""
    storage: Literal["auto", "uint8", "bf16", "fp16", "fp32"] = "auto"
    """Type in which packed 4-bit values are stored; sharding needs that of the other weights."""


class TuningSection(Section):
    """What is trained and with which backend."""

    mode: TuningMode = TuningMode.LORA
    """`qlora`: adapter over a 4-bit base; `lora`: adapter over a 16-bit base; `full`: every weight."""
    backend: Literal["bnb", "unsloth"] = "bnb"
    """`bnb`: transformers, peft and bitsandbytes; `unsloth`: its own kernels, in an environment of its own."""
    lora: LoraSection = LoraSection()
    """The adapter."""
    quantization: QuantizationSection = QuantizationSection()
    """The 4-bit base."""


DataFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "user_assistant", "input_target", "text",
]  # fmt: skip


def _is_none(value: object) -> bool:
    """Left out, a key that came later leaves what earlier versions wrote of a config as it is."""
    return value is None


class DataSource(Section):
    """One of several data sets that are mixed."""

    path: str
    """A file, a folder, a glob, or a hub id."""
    revision: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """Commit, tag or branch of a hub data set; a full commit hash pins it. A file or folder has none."""
    weight: Positive | None = None
    """Share of the mix in rows, relative to the other sources' weights; all sources of a list have one, or none has."""
    format: DataFormat = "auto"
    """Row format of this source."""
    max_rows: Count | None = None
    """Rows taken from this source at most."""


Sources = str | tuple[str | DataSource, ...]


class SplitSection(Section):
    """Shares of `data.train` that are held out where no file is given."""

    validation: Share = 0.0
    """Share of the training rows held out for validation when `data.validation` is not set."""
    test: Share = 0.0
    """Share of the training rows held out for testing when `data.test` is not set."""


class DataSection(Section):
    """The rows and what is learned from them."""

    task: Literal["sft", "cpt", "cpt_mixed"] = "sft"
    """`sft`: instruction tuning; `cpt`: continued pre-training on texts, cut into blocks; `cpt_mixed`: both."""
    train: Sources
    """Training data: a path or hub id, or a list of them, or of {path, revision, weight, format, max_rows}."""
    validation: Sources | None = None
    """Validation data, in the same forms."""
    test: Sources | None = None
    """Test data, in the same forms: prepared and checked beside the others, for `make eval SPLIT=test`."""
    format: DataFormat = "auto"
    """Row format; `auto` detects it from the rows and says which it found."""
    columns: dict[str, str] = {}
    """Mapping of the format's field names to the file's: `{prompt: question, completion: answer}`."""
    loss_on: Literal["assistant", "last", "all", "flags"] = "assistant"
    """Tokens that carry loss: every assistant turn, the last one, all tokens, or messages with `train: true`."""
    split: SplitSection = SplitSection()
    """Held-out shares of the training rows."""
    packing: bool = False
    """Put several rows into one sequence, with exact boundaries between them."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row: stop and list them all, or skip, count and write the rejects."""
    on_overlong: Literal["auto", "truncate", "drop", "split", "error"] = "auto"
    """A row longer than `model.max_seq_len`; `auto`: truncate, but split the texts of `cpt` and `cpt_mixed`.

    Truncation that leaves nothing to learn drops the row; cut, split and dropped rows are counted.
    """
    cross_documents: bool = False
    """Fill the blocks of `cpt` texts across documents, so that a block may hold the end of one and the next's start."""
    max_rows: Count | None = None
    """Rows of the training data taken at most, after shuffling."""
    streaming: bool = False
    """Tokenise while training instead of before, for data larger than the disk."""


class TrainSection(Section):
    """The optimisation, evaluation while training, saving and logging."""

    batch_size: Count | Auto = "auto"
    """Micro-batch: rows that one GPU holds in one forward pass."""
    grad_accum: Count | Auto = "auto"
    """Micro-batches that are summed before one optimizer step."""
    global_batch_size: Count | None = None
    """Rows an optimizer step: batch_size x grad_accum x data-parallel size; 32 where nothing else decides."""
    learning_rate: NonNegative = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate by (global batch / lr_base_batch), or its square root."""
    lr_base_batch: Count | None = None
    """Global batch that `learning_rate` was chosen for; needed by `lr_scaling`."""
    epochs: Positive = 1.0
    """Passes over the training rows. Beside `max_steps` it is an error, or a note where a stronger layer set that."""
    max_steps: Count | None = None
    """Optimizer steps, instead of epochs."""
    bf16: bool | Auto = "auto"
    """bf16 mixed precision; `auto`: where the device has it and fp16 is not asked for."""
    fp16: bool = False
    """fp16 mixed precision with loss scaling, for GPUs without bf16."""
    fp8: bool = False
    """Matrix products of full fine-tuning in fp8, on GPUs that have it (Ada, Hopper and later); needs torchao."""
    tf32: bool | Auto = "auto"
    """TF32 matrix products for fp32 work on NVIDIA GPUs that have it; `auto` leaves torch's default."""
    optim: Literal[
        "auto", "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit",
        "paged_adamw_32bit", "paged_adamw_8bit", "adafactor", "sgd",
    ] = "auto"  # fmt: skip
    """Optimizer. `auto`: fused AdamW on a GPU, AdamW elsewhere."""
    adam_beta1: Share = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Share = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: Positive = 1e-8
    """AdamW's denominator floor."""
    scheduler: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
    ] = "cosine"  # fmt: skip
    """Shape of the learning rate after warm-up."""
    warmup: NonNegative = 0.03
    """Below 1: share of all steps; from 1 on: number of steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (not on biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the gradients' global norm to this; 0 switches clipping off."""
    loss: Literal["auto", "full", "chunked", "fused"] = "auto"
    """How the loss holds its logits: all at once, a tile at a time, or so in Triton kernels (`fused`, on a GPU).
    `auto`: fused on a GPU that has Triton, chunked elsewhere; full under `label_smoothing`."""
    label_smoothing: Share = 0.0
    """Share of the target probability spread over the vocabulary while training; evaluation losses stay plain."""
    neftune_noise_alpha: Positive | None = None
    """Noise on the embeddings while training (NEFTune)."""
    on_spike: Literal["warn", "skip"] = "warn"
    """A gradient norm of more than 10 x the median of the last 64 steps (from step 17 on): `warn` says so, `skip` also
    leaves the step out: no weight and no optimizer state changes, while step count, data and schedule go on.
    """
    gradient_checkpointing: bool | Auto = "auto"
    """Keep one activation a layer and recompute the rest; saves memory, costs about a third more time."""
    activation_offloading: bool = False
    """Keep stored activations in host memory until the backward pass needs them; needs a GPU."""
    torch_compile: bool = False
    """Compile the decoder layers with torch.compile; the first steps take longer."""
    group_by_length: bool = False
    """Put rows of like length into one optimizer step, which saves padding and loosens the shuffle."""
    ddp_find_unused_parameters: bool = False
    """DDP looks for parameters without a gradient in every step."""
    ddp_bucket_cap_mb: Count | None = None
    """Size of DDP's gradient buckets in MiB."""
    ddp_broadcast_buffers: bool = False
    """DDP sends buffers from rank 0 before every forward pass."""
    ddp_static_graph: bool = False
    """Promise DDP that every step uses the same parameters."""
    ddp_timeout: Count | None = None
    """Old name of `dist.timeout_seconds`, in seconds."""
    dataloader_num_workers: NonNegativeInt = 0
    """Worker processes of the data loader; 0 loads in the training process."""
    dataloader_pin_memory: bool | Auto = "auto"
    """Copy batches through page-locked memory; `auto`: on a GPU."""
    dataloader_persistent_workers: bool = False
    """Keep the loader's workers between epochs."""
    dataloader_prefetch_factor: Count | None = None
    """Batches that each worker loads ahead."""
    dataloader_drop_last: bool = False
    """Drop the last incomplete batch of an epoch."""
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    """When to evaluate; `auto`: every epoch where there is validation data, else never."""
    eval_steps: Count | None = None
    """Optimizer steps between two evaluations."""
    eval_on_start: bool = False
    """Evaluate before the first step."""
    eval_batch_size: Count | Auto = "auto"
    """Rows one GPU evaluates at once; `auto`: the training micro-batch, for answers more where memory allows."""
    eval_max_rows: Count | None = None
    """Validation rows used at most."""
    eval_accumulation_steps: Count | None = None
    """Batches of answers that stay on the GPU before they are moved to the host; by default all of one evaluation."""
    eval_do_concat_batches: bool = True
    """Put batches of answers together before they are decoded; no figure depends on it."""
    eval_time_budget: Share = 0.1
    """Share of the training time that generated answers may take; 0 sets no limit."""
    eval_rouge_tokenizer: Literal["rouge_score", "unicode"] = "rouge_score"
    """Words that ROUGE counts: rouge-score's own (a-z and 0-9), or those of every script."""
    predict_with_generate: bool = False
    """Generate answers while evaluating and score them (ROUGE, exact match)."""
    generation_max_new_tokens: Count = 128
    """Longest generated answer in tokens."""
    generation_num_beams: Count = 1
    """Beams; 1 is greedy."""
    generation_do_sample: bool = False
    """Sample instead of taking the likeliest token."""
    generation_temperature: Positive = 1.0
    """Temperature of sampling."""
    generation_top_p: Annotated[float, _Number, Field(gt=0, le=1)] = 1.0
    """Nucleus of sampling."""
    metric_for_best_model: str | None = None
    """Figure that picks the best checkpoint: any of an evaluation's, such as `eval_loss` or `rougeL`."""
    greater_is_better: bool | None = None
    """Direction of that metric; by default lower for a loss, higher for any other."""
    load_best_model_at_end: bool = False
    """Finish with the best checkpoint instead of the last one."""
    early_stopping_patience: Count | None = None
    """Evaluations without improvement after which training stops."""
    early_stopping_threshold: NonNegative = 0.0
    """Improvement that counts as one."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to write a checkpoint."""
    save_steps: Count = 500
    """Optimizer steps between two checkpoints."""
    save_minutes: Positive | None = None
    """Minutes after the last checkpoint at which another is due, at the end of a step, beside `save_strategy`."""
    save_total_limit: Count | None = 2
    """Checkpoints kept; the best and the newest are never deleted."""
    logging_steps: Count = 1
    """Optimizer steps between two log lines; steps that are evaluated, saved or the last are logged too."""
    seed: NonNegativeInt = 42
    """Seed of data order, adapter initialisation and dropout."""
    deterministic: bool = False
    """Only deterministic kernels, slower on a GPU."""


class DistSection(Section):
    """GPUs, strategy and communication."""

    strategy: Strategy = Strategy.AUTO
    """Parallel strategy; `auto` takes the fastest that fits."""
    gpus: Literal["all"] | NonNegativeInt | tuple[NonNegativeInt, ...] | None = None
    """`all` (or 0), a count, or a list of ids; by default 1 for `train`, all for `train-distributed`."""
    zero_level: Literal[1, 2, 3] | None = None
    """DeepSpeed ZeRO stage."""
    shard_weights: bool | None = None
    """Shard the weights between data-parallel ranks."""
    shard_gradients: bool | None = None
    """Shard the gradients between data-parallel ranks."""
    sharding_factor: Count | Literal["all"] | None = None
    """Ranks that share one copy of the weights: 1 is DDP, all is full sharding, between is hybrid."""
    cpu_offload: Literal["none", "optimizer", "params"] = "none"
    """What lives in host memory."""
    nvme_path: str | None = None
    """Folder on a fast disk for DeepSpeed's NVMe offload."""
    all_to_all_reduce: bool = False
    """Reduce gradients by all-to-all where the engine can."""
    copy_engine_all_gather: bool = False
    """All-gather through the GPU's copy engines where the library can."""
    copy_engine_send_recv: bool = False
    """Send and receive through the GPU's copy engines where the library can."""
    sync_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication library; `auto`: NCCL on GPUs, gloo on CPU."""
    timeout_seconds: Count = 1800
    """Longest wait in a collective before the run is ended."""
    num_nodes: Count = 1
    """Machines in the run."""
    node_rank: NonNegativeInt = 0
    """Number of this machine, from 0."""
    main_address: str | None = None
    """Host name or address of machine 0."""
    main_port: Annotated[int, _Number, Field(ge=1, le=65535)] | Auto = "auto"
    """Port of machine 0; `auto` takes a free one (one machine only)."""
    deepspeed_config: str | None = None
    """DeepSpeed JSON file; comments are allowed."""
    prefetch: bool | Auto = "auto"
    """Gather the next layer's weights while this one computes."""


class RunSection(Section):
    """Where the run lives and who hears of it."""

    name: str | None = None
    """Name of the run's folder; by default the config's stem and a hash of what must match on resume."""
    output_dir: str = "runs"
    """Folder that holds all runs."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto`: go on from the newest good checkpoint; `never`: start anew; `must`: refuse to start from zero."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Trackers; `none` for no tracker. All but tensorboard are packages to install, and read their own variables:
    WANDB_API_KEY and WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID.
    """
    tensorboard_port: Annotated[int, _Number, Field(ge=1, le=65535)] = 6006
    """First port tried for TensorBoard."""
    strict_env: bool = False
    """Make a variable that is merely close to a key an error instead of a warning."""


class Config(Section):
    """A whole config."""

    model: ModelSection
    """The base model and how it is loaded."""
    tuning: TuningSection = TuningSection()
    """What is trained and with which backend."""
    data: DataSection
    """The rows and what is learned from them."""
    train: TrainSection = TrainSection()
    """The optimisation, evaluation while training, saving and logging."""
    dist: DistSection = DistSection()
    """GPUs, strategy and communication."""
    run: RunSection = RunSection()
    """Where the run lives and who hears of it."""
