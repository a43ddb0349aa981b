"""Rules between keys: nothing contradicts, nothing that was set is silently without effect.

Each rule is one small function; `RULES` lists them. What no rule can know without the machine, the model or
the data is checked later, by the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.data_rules import DATA_RULES
from sft_play.config.dist_rules import DIST_RULES
from sft_play.config.eval_rules import EVAL_RULES
from sft_play.config.findings import Finding, Rule, ignored, needs, said
from sft_play.config.keys import KEYS
from sft_play.config.not_yet import NOT_YET, refuse_unavailable
from sft_play.config.origin import Resolved
from sft_play.config.schema import TuningMode
from sft_play.config.speed_rules import SPEED_RULES
from sft_play.config.unsloth_rules import UNSLOTH_RULES
from sft_play.errors import ConfigError

__all__ = ["NOT_YET", "RULES", "RUN_NAME_PATTERN", "check_rules", "refuse_unavailable"]

RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""What `run.name` must match in full to be a plain folder name."""


def one_precision(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.bf16 is True and train.fp16:
        yield Finding(
            keys=("train.fp16", "train.bf16"),
            what="train.bf16 and train.fp16 are both true",
            fix="keep train.bf16, or train.fp16 on a GPU without bf16",
        )


def no_half_masters(resolved: Resolved) -> Iterator[Finding]:
    """Weights that are trained themselves are kept in fp32; an adapter's always are."""
    config = resolved.config
    if config.model.dtype in ("bf16", "fp16") and config.tuning.mode is TuningMode.FULL:
        what = f"{said(resolved, 'model.dtype')} cannot be trained whole: small updates are lost in 16 bits"
        fix = "leave model.dtype at auto; mixed precision comes from train.bf16"
        yield Finding(keys=("model.dtype", "tuning.mode"), what=what, fix=fix)


def scaled_learning_rate(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.lr_scaling == "none":
        yield from ignored(resolved, ["train.lr_base_batch"], by="train.lr_scaling", fix="set lr_scaling or remove it")
    elif train.lr_base_batch is None:
        fix = "set train.lr_base_batch to the global batch that learning_rate was chosen for"
        yield needs(resolved, "train.lr_scaling", "train.lr_base_batch", "train.lr_base_batch", fix=fix)


def is_local(name: str) -> bool:
    """Whether `model.name` is a folder: written as a path, or there."""
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        return True
    try:
        return Path(name).is_dir()
    except OSError:  # too long for the disk
        return False


def revision_of_a_hub_model(resolved: Resolved) -> Iterator[Finding]:
    model = resolved.config.model
    if model.revision is not None and is_local(model.name):
        what = f"{said(resolved, 'model.revision')} for the folder {model.name}: a folder has no revision"
        yield Finding(keys=("model.revision", "model.name"), what=what, fix="remove model.revision, or give a hub id")


def pinned_remote_code(resolved: Resolved) -> Iterator[Finding]:
    """Code from a hub can change under a name; from a folder it is the user's own."""
    model = resolved.config.model
    pinned = re.fullmatch(r"[0-9a-fA-F]{40}", model.revision or "")
    if model.trust_remote_code and not pinned and not is_local(model.name):
        fix = "set model.revision to the full 40-digit commit whose code you have read"
        yield needs(resolved, "model.trust_remote_code", "a pinned revision", "model.revision", fix=fix)


def quantization_under_qlora(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.tuning.mode is not TuningMode.QLORA:
        keys = [key for key in KEYS if key.startswith("tuning.quantization.")]
        yield from ignored(resolved, keys, by="tuning.mode", fix="set tuning.mode: qlora or remove it", always=True)


def adapter_under_full(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.tuning.mode is TuningMode.FULL:
        keys = [key for key in KEYS if key.startswith("tuning.lora.")]
        yield from ignored(resolved, keys, by="tuning.mode", fix="set tuning.mode: lora or remove it", always=True)


def adapter_has_targets(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.tuning.lora.target_modules == ():
        what = "tuning.lora.target_modules is empty, so nothing would be trained"
        yield Finding(keys=("tuning.lora.target_modules",), what=what, fix="name layers, or all-linear")


def steps_or_epochs(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.train.max_steps is not None:
        fix = "keep one of them; TRAIN_MAX_STEPS=none takes max_steps away"
        yield from ignored(resolved, ["train.epochs"], by="train.max_steps", fix=fix, always=True)


def batch_divides(resolved: Resolved) -> Iterator[Finding]:
    train, gpus = resolved.config.train, resolved.config.dist.gpus
    if train.global_batch_size is None:
        return
    parts = {"train.batch_size": train.batch_size, "train.grad_accum": train.grad_accum}
    known = {key: value for key, value in parts.items() if isinstance(value, int)}
    product = 1
    for value in known.values():
        product *= value
    alone = (gpus == 1 or (isinstance(gpus, tuple) and len(gpus) == 1)) and resolved.config.dist.num_nodes == 1
    exact = alone and len(known) == len(parts)
    if train.global_batch_size % product or (exact and product != train.global_batch_size):
        shown = " x ".join(said(resolved, key) for key in known)
        relation = "is not" if exact else "does not divide"
        what = f"{shown} {relation} {said(resolved, 'train.global_batch_size')}"
        yield Finding(keys=("train.global_batch_size", *known), what=what, fix="set train.grad_accum: auto")


def saving_settings_used(resolved: Resolved) -> Iterator[Finding]:
    strategy = resolved.config.train.save_strategy
    keys = {
        "steps": [],
        "epoch": ["train.save_steps"],
        "no": ["train.save_steps", "train.save_minutes", "train.save_total_limit"],
    }[strategy]
    yield from ignored(resolved, keys, by="train.save_strategy", fix="set train.save_strategy: steps or remove it")


def optimizer_settings_used(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.train.optim in ("adafactor", "sgd"):
        keys = ["train.adam_beta1", "train.adam_beta2", "train.adam_epsilon"]
        yield from ignored(resolved, keys, by="train.optim", fix="choose an AdamW or remove it")


def loader_workers(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.train.dataloader_num_workers == 0:
        keys = ["train.dataloader_persistent_workers", "train.dataloader_prefetch_factor"]
        fix = "set train.dataloader_num_workers: 2 or remove it"
        yield from ignored(resolved, keys, by="train.dataloader_num_workers", fix=fix)


def run_name_is_a_folder(resolved: Resolved) -> Iterator[Finding]:
    name = resolved.config.run.name
    if name is not None and not RUN_NAME_PATTERN.fullmatch(name):
        what = f"run.name names a folder inside run.output_dir, and {name!r} cannot"
        yield Finding(keys=("run.name",), what=what, fix="use letters, digits, dots, dashes and underscores")


RULES: tuple[Rule, ...] = (
    one_precision, no_half_masters, scaled_learning_rate, revision_of_a_hub_model, pinned_remote_code,
    quantization_under_qlora, adapter_under_full, adapter_has_targets, steps_or_epochs, batch_divides,
    saving_settings_used, optimizer_settings_used, loader_workers,
    run_name_is_a_folder, *DATA_RULES, *EVAL_RULES, *DIST_RULES, *SPEED_RULES, *UNSLOTH_RULES,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the rules refuse and what they only say."""

    errors: tuple[ConfigError, ...]
    notes: tuple[str, ...]


def check_rules(resolved: Resolved, without: Set[str] = frozenset(), rules: Iterable[Rule] = RULES) -> Findings:
    """Applies every rule; findings about a key in `without`, which is known to be wrong already, are left out."""
    found = [one for rule in rules for one in rule(resolved) if without.isdisjoint(one.keys)]
    errors = [ConfigError(one.what, where=_place(resolved, one), fix=one.fix) for one in found if not one.note]
    notes = [f"{_place(resolved, one)}: {one.what}" for one in found if one.note]
    return Findings(errors=tuple(errors), notes=tuple(notes))


def _place(resolved: Resolved, finding: Finding) -> str:
    """Where the first of its keys that somebody wrote stands."""
    written = [resolved.origins[key] for key in finding.keys if resolved.explicit(key)]
    return written[0].where if written else "config"
