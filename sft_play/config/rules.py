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
from sft_play.config.findings import Finding, Rule, ignored, needs, said
from sft_play.config.keys import KEYS
from sft_play.config.not_yet import NOT_YET, refuse_unavailable
from sft_play.config.origin import Resolved
from sft_play.config.schema import TuningMode
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


def has_validation(resolved: Resolved) -> bool:
    """Whether there are rows to evaluate on."""
    data = resolved.config.data
    return bool(data.validation) or data.split.validation > 0


def evaluates(resolved: Resolved) -> bool:
    """Whether the run evaluates while it trains."""
    return resolved.config.train.eval_strategy != "no" and has_validation(resolved)


_EVALUATE = "set data.validation or data.split.validation, and train.eval_strategy other than no"


def evaluation_has_rows(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.eval_strategy in ("steps", "epoch") and not has_validation(resolved):
        fix = "set data.validation, or data.split.validation: 0.05"
        yield needs(resolved, "train.eval_strategy", "validation rows", "data.validation", fix=fix)
    if train.eval_on_start and not evaluates(resolved):
        yield needs(
            resolved, "train.eval_on_start", "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE
        )


def evaluation_steps(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if train.eval_strategy == "steps" and train.eval_steps is None:
        fix = "set train.eval_steps: 100"
        yield needs(resolved, "train.eval_strategy", "train.eval_steps", "train.eval_steps", fix=fix)
    if train.eval_strategy != "steps":
        yield from ignored(
            resolved, ["train.eval_steps"], by="train.eval_strategy", fix="set train.eval_strategy: steps or remove it"
        )


def evaluation_settings_used(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.train.eval_strategy == "no":
        keys = ["eval_max_rows", "eval_accumulation_steps", "eval_time_budget", "predict_with_generate"]
        keys = [f"train.{key}" for key in keys]
        yield from ignored(resolved, keys, by="train.eval_strategy", fix="set train.eval_strategy: epoch or remove it")
    elif resolved.config.train.predict_with_generate and not has_validation(resolved):
        yield needs(resolved, "train.predict_with_generate", "validation rows", "data.validation", fix=_EVALUATE)


def generation_settings_used(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    if not train.predict_with_generate:
        keys = [key for key in KEYS if key.startswith("train.generation_")]
        fix = "set train.predict_with_generate: true or remove it"
        yield from ignored(resolved, keys, by="train.predict_with_generate", fix=fix)
    elif not train.generation_do_sample:
        keys = ["train.generation_temperature", "train.generation_top_p"]
        fix = "set train.generation_do_sample: true or remove it"
        yield from ignored(resolved, keys, by="train.generation_do_sample", fix=fix)


def best_model(resolved: Resolved) -> Iterator[Finding]:
    train = resolved.config.train
    for key in ("train.load_best_model_at_end", "train.metric_for_best_model"):
        if resolved.value(key) and not evaluates(resolved):
            yield needs(resolved, key, "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE)
    if train.metric_for_best_model is None:
        fix = "set train.metric_for_best_model or remove it"
        yield from ignored(resolved, ["train.greater_is_better"], by="train.metric_for_best_model", fix=fix)


def best_model_is_saved(resolved: Resolved) -> Iterator[Finding]:
    """The best evaluation can only be gone back to where a checkpoint was written at that step."""
    train = resolved.config.train
    if not train.load_best_model_at_end or not evaluates(resolved):
        return
    evaluated = "epoch" if train.eval_strategy == "auto" else train.eval_strategy
    fits = train.save_strategy == evaluated and not (
        evaluated == "steps" and train.eval_steps and train.save_steps % train.eval_steps
    )
    if not fits:
        every = {"epoch": "epoch", "steps": f"{train.eval_steps} steps"}[evaluated]
        saved = {"no": "never", "epoch": "every epoch", "steps": f"every {train.save_steps} steps"}[train.save_strategy]
        what = f"train.load_best_model_at_end evaluates every {every} and saves {saved}, so the best may not be saved"
        fix = "set train.save_strategy: epoch" if evaluated == "epoch" else "set train.save_steps to that of eval_steps"
        keys = ("train.load_best_model_at_end", "train.save_strategy", "train.save_steps", "train.eval_steps")
        yield Finding(keys=keys, what=what, fix=f"{fix}{'' if evaluated == 'epoch' else ', save_strategy: steps'}")


def early_stopping(resolved: Resolved) -> Iterator[Finding]:
    train, key = resolved.config.train, "train.early_stopping_patience"
    if train.early_stopping_patience is None:
        fix = "set train.early_stopping_patience or remove it"
        yield from ignored(resolved, ["train.early_stopping_threshold"], by=key, fix=fix)
        return
    if train.metric_for_best_model is None:
        fix = "set train.metric_for_best_model: eval_loss"
        yield needs(resolved, key, "a metric", "train.metric_for_best_model", fix=fix)
    if not evaluates(resolved):
        yield needs(resolved, key, "evaluation", "train.eval_strategy", "data.validation", fix=_EVALUATE)


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
    evaluation_has_rows, evaluation_steps, evaluation_settings_used, generation_settings_used, best_model,
    best_model_is_saved, early_stopping, saving_settings_used, optimizer_settings_used, loader_workers,
    run_name_is_a_folder, *DATA_RULES, *DIST_RULES,
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
