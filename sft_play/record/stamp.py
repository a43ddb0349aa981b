"""The stamp: what made a run and each of its checkpoints, and what may go on with one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play import __version__
from sft_play.config.schema import Config, TuningMode
from sft_play.facts.backends import versions_of
from sft_play.plan.build import Plan
from sft_play.record.run_dir import config_hash, must_match

VERSION = 2
STACK = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "datasets", "tokenizers")
STACK_OF = {"bnb": STACK, "unsloth": (*STACK, "unsloth", "unsloth_zoo", "triton")}
# What a checkpoint holds would not go into another of these.
NEVER_DIFFERS = ("backend", "mode", "quantization", "adapter", "base_model", "base_identity", "precision")
# A run that goes on would not be the run it was; `--force` takes it nevertheless, and says so.
MAY_BE_FORCED = ("global_batch", "data_fingerprint", "tokenizer_hash", "template_hash")
# Strategies whose checkpoints hold whole weights and whole optimizer state: any number of ranks goes on with them.
WHOLE = ("single", "ddp")
_ABSENT = "unknown"


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Hashes of what a run reads.

    Attributes:
        base: of the base model's files.
        tokenizer, template: of tokenizer.json and of the chat template in use; empty where there is none.
        data: fingerprint of every token that is trained on.
        data_before: the same as earlier versions made it; empty where they made no other.
    """

    base: str
    tokenizer: str
    template: str
    data: str
    data_before: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field or key that a checkpoint and a run do not share.

    Attributes:
        forced: whether `--force` takes it.
    """

    name: str
    made: Any
    now: Any
    forced: bool


def make_stamp(config: Config, plan: Plan, identities: Identities) -> dict[str, Any]:
    """Backend, model, method, placement, data, settings and versions, as plain JSON values."""
    tuning = config.tuning.model_dump(mode="json")
    return {
        "version": VERSION,
        "sft_play": __version__,
        "backend": config.tuning.backend,
        "mode": config.tuning.mode.value,
        "quantization": tuning["quantization"] if config.tuning.mode is TuningMode.QLORA else None,
        "adapter": tuning["lora"] if config.tuning.mode is not TuningMode.FULL else None,
        "base_model": config.model.name,
        "base_identity": identities.base,
        "tokenizer_hash": identities.tokenizer,
        "template_hash": identities.template,
        "strategy": plan.strategy,
        "world_size": plan.world_size,
        "precision": {"weights": plan.dtype, "autocast": plan.autocast},
        "global_batch": plan.global_batch,
        "config_hash": config_hash(config),
        "settings": flat(must_match(config)),
        "data_fingerprint": identities.data,
        **({"data_fingerprint_before": identities.data_before} if identities.data_before else {}),
        "python": platform.python_version(),
        "versions": versions_of(config.tuning.backend, STACK_OF[config.tuning.backend]),
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys: `{"train": {"seed": 1}}` gives `{"train.seed": 1}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def stamp_differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What a checkpoint was made by and this run is, where the two may not differ.

    Stamps of version 1 hold no settings but their hash.
    """
    found = [_difference(key, made, now, forced=False) for key in NEVER_DIFFERS if key in made]
    if not {made.get("strategy"), now["strategy"]} <= set(WHOLE):
        found += [_difference(key, made, now, forced=False) for key in ("strategy", "world_size")]
    before = now.get("data_fingerprint_before")
    same_data = before is not None and made.get("data_fingerprint") == before
    may_be = [key for key in MAY_BE_FORCED if key in made and not (key == "data_fingerprint" and same_data)]
    found += [_difference(key, made, now, forced=True) for key in may_be]
    settings = made.get("settings")
    if settings is None:
        found.append(_difference("config_hash", made, now, forced=True))
    else:
        told = {one.name for one in found if one.made != one.now}
        keys = [key for key in sorted({*settings, *now["settings"]}) if not _told_already(key, told)]
        found += [_difference(key, settings, now["settings"], forced=True) for key in keys]
    return [one for one in found if one.made != one.now]


def _difference(name: str, made: Mapping[str, Any], now: Mapping[str, Any], *, forced: bool) -> Difference:
    return Difference(name=name, made=made.get(name, _ABSENT), now=now.get(name, _ABSENT), forced=forced)


_TOLD_BY = {
    "tuning.backend": "backend", "tuning.mode": "mode", "tuning.quantization": "quantization", "tuning.lora": "adapter",
    "model.name": "base_model",
}  # fmt: skip


def _told_already(key: str, told: set[str]) -> bool:
    return any(key.startswith(prefix) and field in told for prefix, field in _TOLD_BY.items())
