"""Rules between `tuning.backend: unsloth` and the other keys: what it replaces, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.findings import Finding, Rule, changed, said
from sft_play.config.origin import Resolved
from sft_play.config.schema import Strategy, TuningMode

BACKEND = "tuning.backend"
# Keys with the values that unsloth leaves to them, and why it takes no other.
TAKES = {
    "model.attention": (("auto", "sdpa"), "unsloth chooses its attention itself"),
    "model.dtype": (("auto", "bf16", "fp16"), "its fused adapters take 16-bit weights"),
    "model.kernels": (("auto",), "unsloth brings its own kernels"),
    "model.trust_remote_code": ((False,), "unsloth replaces the code of architectures that it knows"),
    "tuning.lora.use_dora": ((False,), "its fused adapters have no magnitudes"),
    "tuning.quantization.type": (("nf4",), "it quantises to NF4"),
    "tuning.quantization.double": ((True,), "it quantises the constants too"),
    "tuning.quantization.storage": (("auto", "uint8"), "it stores packed bytes"),
    "train.loss": (("auto", "fused", "full"), "the loss beside it is trl's in Triton, or all logits at once"),
    "train.torch_compile": ((False,), "unsloth compiles what pays itself"),
    "train.activation_offloading": ((False,), "its gradient checkpointing offloads already"),
}
STRATEGIES = (Strategy.AUTO, Strategy.SINGLE, Strategy.DDP)


def unsloth_trains_adapters(resolved: Resolved) -> Iterator[Finding]:
    """Whole weights go through another part of unsloth, without the layers that it is fast by."""
    if _unsloth(resolved) and resolved.config.tuning.mode is TuningMode.FULL:
        fix = "set tuning.mode: lora or qlora, or tuning.backend: bnb"
        yield Finding(
            keys=(BACKEND, "tuning.mode"),
            what=f"{said(resolved, BACKEND)} trains adapters, and tuning.mode is full",
            fix=fix,
        )


def unsloth_replaces(resolved: Resolved) -> Iterator[Finding]:
    if not _unsloth(resolved):
        return
    for key, (values, why) in TAKES.items():
        if resolved.value(key) not in values:
            what = f"{said(resolved, key)} does not go with {said(resolved, BACKEND)}: {why}"
            yield Finding(keys=(key, BACKEND), what=what, fix=f"remove it, or set {BACKEND}: bnb")


def unsloth_keeps_weights_whole(resolved: Resolved) -> Iterator[Finding]:
    """One GPU, or a copy on each: its kernels read whole weights."""
    if not _unsloth(resolved):
        return
    dist, fix = resolved.config.dist, "remove it, or set tuning.backend: bnb"
    wrong = [] if dist.strategy in STRATEGIES else ["dist.strategy"]
    wrong += ["dist.zero_level"] if dist.zero_level is not None else []
    wrong += ["dist.cpu_offload"] if dist.cpu_offload != "none" else []
    wrong += [key for key in ("dist.shard_weights", "dist.shard_gradients") if resolved.value(key)]
    wrong += ["dist.sharding_factor"] if dist.sharding_factor not in (None, 1) else []
    for key in wrong:
        what = f"{said(resolved, key)} does not go with {said(resolved, BACKEND)}: one GPU, or DDP with a copy on each"
        yield Finding(keys=(key, BACKEND), what=what, fix=fix)


def unsloth_dropout(resolved: Resolved) -> Iterator[Finding]:
    key = "tuning.lora.dropout"
    if _unsloth(resolved) and changed(resolved, key):
        what = f"{said(resolved, key)} keeps unsloth's fused adapters off where they have none for it: 0 is the fastest"
        yield Finding(keys=(key, BACKEND), what=what, fix="", note=True)


def _unsloth(resolved: Resolved) -> bool:
    return resolved.config.tuning.backend == "unsloth"


UNSLOTH_RULES: tuple[Rule, ...] = (
    unsloth_trains_adapters, unsloth_replaces, unsloth_keeps_weights_whole, unsloth_dropout,
)  # fmt: skip
