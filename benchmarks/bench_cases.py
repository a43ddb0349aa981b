"""What `make bench` measures: a shape, a method, a length, a micro-batch, packed or not, beside published figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import equal_rows
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.facts.model import catalog, facts_from_config
from sft_play.plan.build import PlanInputs, choose
from sft_play.plan.layouts import Layout
from sft_play.plan.settings import Placement

LLAMA_1B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B"
QWEN_600M, QWEN_4B, QWEN_8B = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"
LORA_R = 16

# Widths for which two CPU cores need about half a second a step: the rest of the shape is the catalog model's.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of others for the same shape and method.

    Attributes:
        value: tokens/s of one GPU.
    """

    value: float
    gpu: str
    source: str

    @property
    def text(self) -> str:
        return f"{self.value:,.0f} tokens/s, {self.gpu}, {self.source}"


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One row.

    Attributes:
        model: a key of the catalog; with `small` only its family, at the widths of SMALL.
        micro_batch: rows of a step, or packs of `seq_len` tokens.
        dtype: `model.dtype`; fp32 also turns autocast off.
        checkpointing: `auto` is what the plan takes.
    """

    name: str
    model: str
    method: str
    seq_len: int
    micro_batch: int
    packing: bool = False
    dtype: str = "auto"
    checkpointing: bool | str = "auto"
    small: bool = False
    published: Published | None = None

    @property
    def shape(self) -> str:
        """The model in words."""
        if not self.small:
            return self.model
        return f"{self.model.split('/')[1]} cut to {SMALL['num_hidden_layers']} layers of {SMALL['hidden_size']}"

    @property
    def model_key(self) -> str:
        """The name of the folder that holds these weights."""
        return self.model.replace("/", "--") + ("-small" if self.small else "")

    def model_config(self) -> dict[str, Any]:
        """The config.json to build; the figures of the catalog that are no part of one are left out."""
        values = {key: value for key, value in catalog()[self.model].items() if key != "parameters"}
        return values | (SMALL if self.small else {})

    def settings(self, *, model: str, rows: str, output: Path, steps: int) -> dict[str, Any]:
        """The config that the program is given."""
        values: dict[str, Any] = {
            "model": {"name": model, "max_seq_len": self.seq_len, "dtype": self.dtype},
            "tuning": {"mode": self.method},
            "data": {"train": rows, "packing": self.packing},
            "train": {
                "batch_size": self.micro_batch,
                "grad_accum": 1,
                "max_steps": steps,
                "gradient_checkpointing": self.checkpointing,
                "eval_strategy": "no",
                "save_strategy": "no",
            },
            "run": {"output_dir": str(output)},
        }
        if self.method != "full":
            values["tuning"]["lora"] = {"r": LORA_R, "alpha": 2 * LORA_R}
        if self.dtype == "fp32":
            values["train"]["bf16"] = False
        return values

    def why_not(self, hardware: Hardware) -> str:
        """Why the plan does not run this case on one device of this machine; empty where it does."""
        steps = 8
        inputs = PlanInputs(
            config=Config.model_validate(self.settings(model=self.model, rows="rows", output=Path(), steps=steps)),
            hardware=hardware,
            facts=facts_from_config(self.model_config(), name=self.shape),
            data=equal_rows(self.micro_batch * steps, self.seq_len),
            only=[Layout(placement=Placement.SINGLE)],
        )
        try:
            choice = choose(inputs)
        except ConfigError as error:
            return str(error)
        return "" if choice.chosen else choice.candidates[0].reason


_LORA = BenchCase(name="lora", model=LLAMA_1B, method="lora", seq_len=256, micro_batch=4, checkpointing=False,
                  dtype="fp32", small=True)  # fmt: skip
CPU_CASES = (
    _LORA,
    replace(_LORA, name="qlora", method="qlora"),
    replace(_LORA, name="full", method="full"),
    replace(_LORA, name="full-packed", method="full", packing=True),
)
# The smallest of all, in no list: the tests measure it in seconds.
TINY_CASE = replace(_LORA, name="tiny", seq_len=32, micro_batch=2)

NEMO, UNSLOTH, TORCHTITAN = "NeMo AutoModel", "Unsloth", "torchtitan (benchmarks/llama3_h100_202412)"
_BIG = BenchCase(name="llama-3-8b-lora-4096", model=LLAMA_8B, method="lora", seq_len=4096, micro_batch=2,
                 published=Published(value=12_473, gpu="H100", source=NEMO))  # fmt: skip
_QWEN = BenchCase(name="qwen3-8b-lora-packed-2048", model=QWEN_8B, method="lora", seq_len=2048, micro_batch=4,
                  packing=True,
                  published=Published(value=9_100, gpu="H200", source=UNSLOTH))  # fmt: skip
GPU_CASES = (
    BenchCase(name="llama-3.2-1b-lora-2048", model=LLAMA_1B, method="lora", seq_len=2048, micro_batch=4),
    BenchCase(name="qwen3-0.6b-full-2048", model=QWEN_600M, method="full", seq_len=2048, micro_batch=4),
    BenchCase(name="qwen3-4b-nf4-packed-2048", model=QWEN_4B, method="qlora", seq_len=2048, micro_batch=4, packing=True,
              published=Published(value=12_100, gpu="H200", source=UNSLOTH)),
    _BIG,
    replace(_BIG, name="llama-3-8b-full-8192", method="full", dtype="bf16", seq_len=8192, micro_batch=1,
            published=Published(value=6_667, gpu="each of 8 H100, compiled", source=TORCHTITAN)),
    _QWEN,
    replace(_QWEN, name="qwen3-8b-nf4-packed-2048", method="qlora",
            published=Published(value=8_400, gpu="H200", source=UNSLOTH)),
)  # fmt: skip


def case_named(name: str) -> BenchCase:
    """The case of any list that is called so.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for case in (*CPU_CASES, TINY_CASE, *GPU_CASES)}[name]


def chosen_cases(*, on_gpu: bool, names: str) -> tuple[BenchCase, ...]:
    """The device's list, or the cases named, a comma between.

    Raises:
        KeyError: no case has this name.
    """
    if names:
        return tuple(case_named(name.strip()) for name in names.split(","))
    return GPU_CASES if on_gpu else CPU_CASES
