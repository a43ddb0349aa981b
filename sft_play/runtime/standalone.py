"""A model that stands by itself, for `make eval`: a run's result, or folders, as they were trained or as they lie."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import ModelError
from sft_play.runtime.answers import Generation
from sft_play.runtime.evaluation import generation_of
from sft_play.runtime.generate import end_token_ids
from sft_play.runtime.job import Job
from sft_play.runtime.model import DTYPES, keep_layout, load_tokenizer, quantization


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is evaluated.

    Attributes:
        model: folder of the weights; an adapter's base.
        base: what the model was before its training, where that is another folder of whole weights.
        dtype: of the weights; `auto` takes that of the files.
        autocast: `bf16`, `fp16` or `fp32` (none).
    """

    model: Path
    adapter: Path | None = None
    base: Path | None = None
    dtype: str = "auto"
    autocast: str = "fp32"
    attention: str = "sdpa"
    quantization: BitsAndBytesConfig | None = None
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        """Where tokenizer and template lie."""
        return self.adapter or self.model


def target_of_run(job: Job) -> Target:
    """A run's result, loaded in the types that it was trained in.

    Raises:
        ModelError: the base model is gone, or there is no result yet.
    """
    if not job.model_path.is_dir():
        raise ModelError("the run's base model is not there any more", where=str(job.model_path))
    adapted, whole = job.run.adapter.is_dir(), job.run.model.is_dir()
    if not (adapted or whole):
        raise ModelError("the run has no result yet", where=str(job.run.path), fix="finish it with make train")
    flash = job.plan.attention.startswith("flash") and not torch.cuda.is_available()
    return Target(
        model=job.model_path if adapted else job.run.model,
        adapter=job.run.adapter if adapted else None,
        base=None if adapted else job.model_path,
        dtype=job.plan.dtype,
        autocast=job.plan.autocast,
        attention="sdpa" if flash else job.plan.attention,
        quantization=quantization(job.config, job.plan),
        trust_remote_code=job.config.model.trust_remote_code,
    )


def load_target(target: Target) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model, in evaluation mode on the first GPU or the CPU, and its tokenizer.

    Raises:
        ModelError: the adapter's folder is no adapter.
    """
    if target.adapter is not None and not (target.adapter / "adapter_config.json").is_file():
        fix = "give ADAPTER=runs/NAME/adapter, or one of its checkpoints"
        raise ModelError("adapter_config.json is missing", where=str(target.adapter), fix=fix)
    model = _load(target, target.model)
    if target.adapter is not None:
        model = PeftModel.from_pretrained(model, str(target.adapter)).eval()
    return model, load_tokenizer(target.folder, None, trust_remote_code=target.trust_remote_code)


def load_base(target: Target) -> Any:
    """What a whole model was before its training."""
    assert target.base is not None
    return _load(target, target.base)


def without_adapter(model: Any) -> AbstractContextManager[Any]:
    """The base model alone while this lasts."""
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()


def _load(target: Target, folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES.get(target.dtype, "auto"),
        attn_implementation=target.attention,
        quantization_config=target.quantization,
        device_map={"": 0} if torch.cuda.is_available() else None,
        trust_remote_code=target.trust_remote_code,
        local_files_only=True,
    )
    keep_layout(loaded)
    return loaded.eval()


def answers_of(config: Config, model: Any, tokenizer: PreTrainedTokenizerBase, target: Target) -> Generation:
    """How answers are made: as the config says, ending where training taught it."""
    pad = tokenizer.pad_token_id
    ends = end_token_ids(load_text_tokenizer(target.folder), model.generation_config)
    return generation_of(config, ends, pad if isinstance(pad, int) else 0, autocast=target.autocast)
