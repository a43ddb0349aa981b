"""Base model and adapter through unsloth: its layers and gradient checkpointing, under the trainer of every backend.

The loss is trl's, so figures mean what they mean elsewhere, and the adapter is a plain one of peft. What unsloth does
to transformers' Trainer is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoConfig, Trainer

from sft_play.config.schema import Config, TuningMode
from sft_play.errors import AppliedDiffersError, ConfigError
from sft_play.plan.build import Plan
from sft_play.runtime.dist import Ranks
from sft_play.runtime.model import DTYPES, repair_generation_config

HOME = "unsloth"
# Where it keeps embeddings that are trained whole while it builds the adapter.
BUFFERS = "unsloth-buffers"


def load_unsloth(config: Config, plan: Plan, path: Path, folder: Path, ranks: Ranks) -> PeftModel:
    """The base model in unsloth's layers, 4-bit under `tuning.mode: qlora`, with the configured adapter.

    Args:
        folder: where it may write what it needs while it loads.

    Raises:
        AppliedDiffersError: it has given the model tokens of its own.
        ConfigError: an adapter that unsloth has no way to train.
    """
    lora = config.tuning.lora
    checkpointing = "unsloth" if plan.gradient_checkpointing else False
    fast = import_module(HOME).FastLanguageModel  # only its own environment has it
    with upstream_trainer():
        model, _ = fast.from_pretrained(
            model_name=str(path),
            use_exact_model_name=True,  # else it looks for a 4-bit copy of its own on the hub
            local_files_only=True,
            max_seq_length=longest(config, path),
            dtype=DTYPES[plan.dtype],
            load_in_4bit=config.tuning.mode is TuningMode.QLORA,
            device_map={"": ranks.local_rank},
            fix_tokenizer=False,
            offload_embedding=False,  # where memory is tight it would, and another memory was planned
            use_gradient_checkpointing=checkpointing,
            random_state=config.train.seed,
        )
        repair_generation_config(model)
        refuse_added_tokens(model, path)
        try:
            return fast.get_peft_model(
                model,
                r=lora.r,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules="all-linear" if lora.target_modules == "all-linear" else list(lora.target_modules),
                modules_to_save=list(lora.modules_to_save) or None,
                use_rslora=lora.use_rslora,
                use_gradient_checkpointing=checkpointing,
                temporary_location=str(folder / BUFFERS),
                random_state=config.train.seed,
            )
        except (TypeError, ValueError) as error:
            what = str(error).splitlines()[0].removeprefix("Unsloth: ").split(". ")[0]
            raise ConfigError(what, where="tuning.lora", fix="name others, or set tuning.backend: bnb") from error


def longest(config: Config, path: Path) -> int:
    """Longest row that the model is told of; beyond its positions unsloth would stretch them without asking."""
    text = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    return min(config.model.max_seq_len, getattr(text, "max_position_embeddings", None) or config.model.max_seq_len)


def refuse_added_tokens(model: Any, path: Path) -> None:
    """Where a tokenizer names no padding that unsloth likes it adds one, and the adapter would fit no other base.

    Raises:
        AppliedDiffersError: the embedding has grown.
    """
    text = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != text.vocab_size:
        what = f"unsloth made {rows} embeddings of the base's {text.vocab_size}"
        raise AppliedDiffersError(
            what, where=str(path), fix="give the tokenizer a pad_token, or use tuning.backend: bnb"
        )


@contextmanager
def upstream_trainer() -> Iterator[None]:
    """Leaves transformers' Trainer as it was: loading a model through unsloth replaces its loop, step and loss."""
    before = dict(vars(Trainer))
    try:
        yield
    finally:
        for name in [one for one in vars(Trainer) if one not in before]:
            delattr(Trainer, name)
        for name, value in before.items():
            if vars(Trainer)[name] is not value:
                setattr(Trainer, name, value)


def missing_layers(layers: list[Any]) -> list[str]:
    """What of unsloth is not in the decoder: the attention of every layer has to run its code."""
    plain = [layer for layer in layers if not _is_unsloths(layer.self_attn.forward)]
    return [f"{len(plain)} of {len(layers)} attention layers are not unsloth's"] if plain or not layers else []


def _is_unsloths(function: Any) -> bool:
    return str(getattr(getattr(function, "__func__", function), "__module__", "")).startswith(HOME)
