"""What makes a run faster or smaller beside its batch and placement: loss, kernels, attention, fp8, offloading.

Each choice is a value and the reason for it; what the device cannot do is an error that names the key.
"""

from __future__ import annotations

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentProblem
from sft_play.facts.hardware import Gpu
from sft_play.plan.precision import choose_autocast, name_of
from sft_play.plan.settings import Dtype, Kernels, Loss, Method, Settings
from sft_play.plan.sharding import shards_weights

# Compute capability of the first GPUs with what FlashAttention-2 and bf16 kernels need (Ampere), and of the only ones
# that FlashAttention-3 is written for (Hopper).
AMPERE, HOPPER = 8.0, 9
# Architectures by config.json's model_type whose layers liger 0.8 replaces (liger_kernel/transformers, the table
# MODEL_TYPE_TO_APPLY_LIGER_FN); the dense text models of them.
LIGER_MODELS = frozenset(
    {
        "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "phi3",
        "qwen2", "qwen3", "qwen3_moe", "smollm3",
    }
)  # fmt: skip
# The same of unsloth 2026.10 (unsloth/models/loader.py); it would load others without the layers that it is fast by.
UNSLOTH_MODELS = frozenset({"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"})
# The import that shows that a package of kernels is there, by the value that asks for it.
PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "liger": "liger_kernel",
    "hub": "kernels",
    "fused": "triton",
    "fp8": "torchao",
}
# What to install for it; the range of `kernels` is transformers' own (5.23, KERNELS_MIN_VERSION).
INSTALL = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "liger": "liger-kernel",
    "hub": "kernels>=0.18.2,<0.19",
    "fused": "triton",
    "fp8": "torchao",
}


def need_package(gpu: Gpu, wanted: str, key: str) -> None:
    """The package behind a value has to be importable; of a described card nothing is known, and nothing refused.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    if gpu.packages is not None and PACKAGES[wanted] not in gpu.packages:
        what = f"{wanted} needs the package {INSTALL[wanted]}, which is not installed"
        raise EnvironmentProblem(what, where=key, fix=f"install it beside torch, or remove {key}")


def choose_loss(config: Config, gpu: Gpu | None) -> tuple[str, str]:
    """(`full`, `chunked` or `fused`, reason).

    Raises:
        EnvironmentProblem: the fused one without a GPU, or without Triton.
    """
    asked = config.train.loss
    if asked == "fused" and config.tuning.backend != "unsloth":
        if gpu is None:
            raise EnvironmentProblem(
                "the fused loss is made of Triton kernels and needs a GPU",
                where="train.loss",
                fix="use chunked or auto",
            )
        need_package(gpu, "fused", "train.loss")
    if config.train.label_smoothing:
        return "full", "loss full: label smoothing needs all logits at once"
    if asked == "full":
        return "full", "loss full, as configured: all logits of a micro-batch are held at once"
    triton = gpu is not None and not gpu.amd and (gpu.packages is None or "triton" in gpu.packages)
    triton = triton or (gpu is not None and config.tuning.backend == "unsloth")  # its environment has it
    if asked == "fused" or (asked == "auto" and triton):
        return "fused", "loss fused, a tile at a time in Triton kernels: logits are never held whole"
    return "chunked", "loss in chunks: logits are never held whole"


def planned_loss(config: Config, gpu: Gpu | None) -> Loss:
    """The loss by its memory: whole logits, or tiles that Triton or torch computes."""
    chosen = choose_loss(config, gpu)[0]
    return {"full": Loss.FULL, "fused": Loss.CHUNKED}.get(chosen, Loss.CHUNKED_IN_TORCH)


def choose_kernels(config: Config, gpu: Gpu | None, model_type: str = "") -> tuple[str, str]:
    """(`none`, `liger`, `hub` or `unsloth`, reason).

    Args:
        model_type: of config.json; empty where it is not known yet, and then nothing is refused for it.

    Raises:
        ConfigError: liger, or unsloth, does not know the architecture.
        EnvironmentProblem: the kernels asked for need a GPU or a package.
    """
    asked, key = config.model.kernels, "model.kernels"
    if config.tuning.backend == "unsloth":
        if model_type and model_type not in UNSLOTH_MODELS:
            what = f"unsloth has no fast layers for {model_type}"
            raise ConfigError(what, where="tuning.backend", fix="set tuning.backend: bnb")
        return "unsloth", "kernels unsloth: fused adapters, norms, rotary embedding and MLP; it runs no other here"
    if asked == "none":
        return "none", "kernels none, as configured"
    if asked in ("liger", "hub"):
        if gpu is None:
            what = f"{asked} kernels need a GPU and none is used"
            raise EnvironmentProblem(what, where=key, fix="remove it, or set it to none")
        need_package(gpu, asked, key)
        if asked == "liger" and model_type and model_type not in LIGER_MODELS:
            raise ConfigError(f"liger has no kernels for {model_type}", where=key, fix="use none or auto")
        return asked, f"kernels {asked}, as configured"
    if gpu is None:
        return "none", "kernels none: those there are need a GPU"
    if gpu.packages is None:
        return "none", "kernels none: what is installed on a described machine is unknown; MODEL_KERNELS=liger plans it"
    if not {"liger_kernel", "triton"} <= gpu.packages:
        return "none", "kernels none: liger-kernel is not installed"
    if model_type not in LIGER_MODELS:
        return "none", f"kernels none: liger has none for {model_type}"
    return "liger", "kernels liger: fused norms, rotary embedding and MLP"


def planned_kernels(config: Config, gpu: Gpu | None, model_type: str = "") -> Kernels:
    """The library by its costs; those of the hub are not measured and counted as transformers' own."""
    library = {"liger": Kernels.LIGER, "unsloth": Kernels.UNSLOTH}
    return library.get(choose_kernels(config, gpu, model_type)[0], Kernels.HF)


def choose_attention(config: Config, gpu: Gpu | None) -> str:
    """The attention kernel by transformers' name; `auto` is torch's own, exact and always there.

    Raises:
        ConfigError: the device cannot run it, or not in this precision.
        EnvironmentProblem: its package is not installed.
    """
    asked, key = config.model.attention, "model.attention"
    if asked.startswith("flash") or asked == "flex_attention":
        _refuse_kernel(asked, gpu, key)
        if asked.startswith("flash") and choose_autocast(config, gpu)[0] is Dtype.FP32:
            raise ConfigError(f"{asked} computes in 16 bits only", where=key, fix="leave train.bf16 at auto")
    return "sdpa" if asked == "auto" else asked


def _refuse_kernel(asked: str, gpu: Gpu | None, key: str) -> None:
    if gpu is None:
        why = ": torch has no backward pass of it for CPUs" if asked == "flex_attention" else ""
        raise ConfigError(f"{asked} needs a GPU{why}", where=key, fix="use sdpa or auto")
    capability = float(gpu.compute_capability or 0)
    if asked == "flash_attention_3" and int(capability) != HOPPER:
        what = f"{asked} is written for Hopper GPUs and {gpu.name} is none"
        raise ConfigError(what, where=key, fix="use flash_attention_2 or sdpa")
    if not gpu.amd and capability < AMPERE:
        raise ConfigError(f"{asked} needs Ampere or later and {gpu.name} is older", where=key, fix="use sdpa or auto")
    if asked in PACKAGES:
        need_package(gpu, asked, key)


def refuse_without_device(config: Config, gpu: Gpu | None) -> None:
    """Offloading and fp8 where the device or the stack has no such thing.

    Raises:
        ConfigError: activations cannot be offloaded from a CPU.
        EnvironmentProblem: no fp8 units, or no torchao.
    """
    if config.train.activation_offloading and gpu is None:
        raise ConfigError(
            "activations are in host memory already: offloading needs a GPU",
            where="train.activation_offloading",
            fix="remove it",
        )
    if not config.train.fp8:
        return
    if gpu is None or not gpu.fp8:
        what = f"{name_of(gpu)} has no fp8 units"
        raise EnvironmentProblem(what, where="train.fp8", fix="remove it: bf16 is the fastest there")
    need_package(gpu, "fp8", "train.fp8")


def refuse_without_cuda(config: Config, gpu: Gpu | None) -> None:
    """unsloth's kernels are Triton's, and its environment is made for NVIDIA's GPUs.

    Raises:
        EnvironmentProblem: there is none.
    """
    if config.tuning.backend == "unsloth" and (gpu is None or gpu.amd):
        what = f"unsloth needs a CUDA GPU and {'none is seen' if gpu is None else f'{gpu.name} is none'}"
        raise EnvironmentProblem(what, where="tuning.backend", fix="train where one is, or set TUNING_BACKEND=bnb")


def refuse_storage(config: Config, settings: Settings) -> None:
    """Sharding flattens all weights of a layer together, so packed 4-bit values need the type of the others.

    Raises:
        ConfigError: they have another.
    """
    asked, own = config.tuning.quantization.storage, settings.param_dtype.value
    if settings.method is not Method.QLORA or asked == "auto" or not shards_weights(settings) or asked == own:
        return
    raise ConfigError(
        f"{settings.placement.value} shards 4-bit values beside {own} weights and cannot where they lie in {asked}",
        where="tuning.quantization.storage",
        fix=f"leave it at auto, or use {own}",
    )


def speed_reasons(config: Config) -> tuple[str, ...]:
    """A line for each key of speed or size that is on."""
    train, found = config.train, []
    if train.torch_compile:
        found.append("compiled: each decoder layer, for any length; the first steps take minutes more on a GPU")
    if train.activation_offloading:
        found.append("activations wait in host memory for the backward pass")
    if train.fp8:
        found.append("fp8 products in the decoder's linear layers, scaled by tensor")
    if train.group_by_length:
        found.append("rows of like length in each step, the longest first")
    return tuple(found)
