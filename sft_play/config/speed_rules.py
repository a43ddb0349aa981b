"""Rules between the keys that make training faster or smaller, and the others."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.findings import Finding, Rule, ignored, said
from sft_play.config.origin import Resolved
from sft_play.config.schema import TuningMode


def _exclude(resolved: Resolved, key: str, other: str, fix: str) -> Finding:
    what = f"{said(resolved, key)} does not go with {said(resolved, other)}"
    return Finding(keys=(key, other), what=what, fix=fix)


def smoothing_needs_all_logits(resolved: Resolved) -> Iterator[Finding]:
    """A target spread over the vocabulary needs every logit; chunks and fused kernels keep the target's only."""
    train = resolved.config.train
    if train.label_smoothing and train.loss not in ("auto", "full"):
        yield _exclude(resolved, "train.loss", "train.label_smoothing", "set train.loss: full or auto")


def rows_to_group(resolved: Resolved) -> Iterator[Finding]:
    """Packs are full already, and the lengths of a stream are not known."""
    config, key = resolved.config, "train.group_by_length"
    if config.data.packing:
        yield from ignored(resolved, [key], by="data.packing", fix="remove it: packs are full already")
    if config.data.streaming:
        yield from ignored(resolved, [key], by="data.streaming", fix="remove it: a stream's rows come in their order")


def offload_or_compile(resolved: Resolved) -> Iterator[Finding]:
    """Compiled layers choose for themselves what they keep."""
    train = resolved.config.train
    if train.activation_offloading and train.torch_compile:
        yield _exclude(resolved, "train.activation_offloading", "train.torch_compile", "keep one of them")


def fp8_trains_whole_weights(resolved: Resolved) -> Iterator[Finding]:
    """fp8 products replace those of linear layers that train; adapters and 4-bit layers have their own."""
    config = resolved.config
    if not config.train.fp8:
        return
    if config.tuning.mode is not TuningMode.FULL:
        yield _exclude(resolved, "train.fp8", "tuning.mode", "set tuning.mode: full, or remove it")
    if config.train.fp16:
        yield _exclude(resolved, "train.fp8", "train.fp16", "remove train.fp16: fp8 stands on bf16")
    elif config.train.bf16 is False:
        yield _exclude(resolved, "train.fp8", "train.bf16", "remove train.bf16: fp8 stands on it")


SPEED_RULES: tuple[Rule, ...] = (
    smoothing_needs_all_logits, rows_to_group, offload_or_compile, fp8_trains_whole_weights,
)  # fmt: skip
