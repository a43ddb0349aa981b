"""The runs that `benchmarks/measure.py` measures: a catalog model, a method, a batch, a length, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from sft_play.config.schema import Config
from sft_play.facts.data import DataFacts, SplitFacts
from sft_play.facts.hardware import Hardware
from sft_play.facts.model import catalog, facts_from_config
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.build import PlanInputs, choose
from sft_play.plan.layouts import Layout
from sft_play.plan.settings import Placement
from sft_play.plan.strategy import Candidate

# Widths of the models that a CPU trains in seconds; the rest of the shape is the catalog model's.
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to measure, on one device.

    Attributes:
        model: a key of the catalog; with `tiny` only its family, at the widths of TINY.
        layers: keep only so many of its layers; 0 for all.
        short: what the case's name calls it.
        dtype: `model.dtype` of the config; `auto` is what the product would take.
    """

    model: str
    short: str
    method: str
    micro_batch: int
    seq_len: int
    checkpointing: bool
    dtype: str = "auto"
    tiny: bool = False
    layers: int = 0
    lora_r: int = field(default=16)

    @property
    def name(self) -> str:
        """Such as `llama-8b-qlora-4x2048-ckpt`."""
        batch = f"{self.micro_batch}x{self.seq_len}"
        kind = self.method if self.dtype == "auto" else f"{self.method}-{self.dtype}"
        return "-".join([self.short, kind, batch, "ckpt" if self.checkpointing else "plain"])

    @property
    def row_model(self) -> str:
        if self.tiny:
            return f"{self.model} cut to {TINY['num_hidden_layers']} tiny layers"
        return f"{self.model} cut to {self.layers} layers" if self.layers else self.model

    def model_config(self) -> dict[str, Any]:
        """The config.json to build."""
        kept = {"num_hidden_layers": self.layers} if self.layers else {}
        return catalog()[self.model] | kept | (TINY if self.tiny else {})

    def facts(self) -> ModelFacts:
        return facts_from_config(self.model_config(), name=self.row_model)

    def config(self, *, steps: int) -> Config:
        """The config with which the product would run this case; no rows are read, saved or evaluated."""
        return Config.model_validate(
            {
                "model": {"name": self.model, "max_seq_len": self.seq_len, "dtype": self.dtype},
                "tuning": {"mode": self.method, "lora": {"r": self.lora_r}},
                "data": {"train": "synthetic"},
                "train": {
                    "batch_size": self.micro_batch,
                    "grad_accum": 1,
                    "max_steps": steps,
                    "warmup": 0,
                    "gradient_checkpointing": self.checkpointing,
                    "eval_strategy": "no",
                    "save_strategy": "no",
                },
            }
        )

    def candidate(self, hardware: Hardware, *, steps: int) -> Candidate:
        """What the plan says of it on one device, whether it fits or not."""
        inputs = PlanInputs(
            config=self.config(steps=steps),
            hardware=hardware,
            facts=self.facts(),
            data=equal_rows(self.micro_batch * steps, self.seq_len),
            only=[Layout(placement=Placement.SINGLE)],
        )
        return choose(inputs).candidates[0]


def equal_rows(rows: int, seq_len: int) -> DataFacts:
    """What a case trains on: random tokens in rows of one length, so that nothing is padded and no mask is made."""
    train = SplitFacts(
        rows_read=rows,
        rows_kept=rows,
        dropped={},
        truncated=0,
        tokens=rows * seq_len,
        loss_tokens=rows * (seq_len - 1),
        longest=seq_len,
        percentiles={},
        histogram=((seq_len, rows),),
        formats={},
        end_of_turn_share=1.0,
    )
    return DataFacts(key="", fingerprint="", max_seq_len=seq_len, splits={"train": train})


LLAMA_1B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B"
QWEN_14B, QWEN_32B = "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-32B-Instruct"


def _cases(model: str, short: str, *rows: tuple[str, int, int, bool], layers: int = 0) -> tuple[Case, ...]:
    return tuple(
        Case(
            model=model,
            short=short,
            method=method.partition(" ")[0],
            dtype=method.partition(" ")[2] or "auto",
            micro_batch=micro_batch,
            seq_len=seq_len,
            checkpointing=checkpointing,
            tiny=short == "tiny",
            layers=layers,
        )
        for method, micro_batch, seq_len, checkpointing in rows
    )


CPU_CASES = _cases(
    LLAMA_1B, "tiny",
    ("full", 2, 128, False), ("full", 2, 128, True),
    ("lora", 2, 128, False), ("lora", 4, 256, True),
    ("qlora", 2, 128, False), ("qlora", 2, 128, True),
)  # fmt: skip

GPU_CASES = (
    *_cases(
        LLAMA_1B, "llama-1b",
        ("full", 4, 2048, False), ("full", 8, 2048, True), ("full bf16", 4, 2048, True),
        ("lora", 4, 2048, False), ("lora", 16, 2048, True), ("qlora", 8, 2048, True),
    ),
    *_cases(
        LLAMA_8B, "llama-8b",
        ("full", 1, 2048, True), ("full bf16", 2, 2048, True), ("full bf16", 8, 4096, True),
        ("lora", 1, 2048, False), ("lora", 4, 2048, False), ("lora", 8, 4096, True),
        ("qlora", 1, 2048, False), ("qlora", 4, 2048, True), ("qlora", 8, 4096, True),
        ("lora", 32, 4096, False),  # far too large for any one GPU of today: a verdict to check
    ),
    *_cases(QWEN_14B, "qwen-14b", ("qlora", 1, 2048, False), ("qlora", 4, 2048, True), ("qlora", 8, 4096, True)),
    *_cases(QWEN_32B, "qwen-32b", ("qlora", 1, 2048, True), ("qlora", 4, 2048, True), ("qlora", 4, 4096, True)),
)  # fmt: skip


# Two layers of full width: minutes for all of them, for the tests on a GPU; they are in no list of their own.
WIDE_CASES = _cases(
    LLAMA_8B, "wide",
    ("full", 2, 1024, False), ("full bf16", 2, 1024, True),
    ("lora", 4, 2048, False), ("lora", 4, 2048, True),
    ("qlora", 4, 2048, False), ("qlora", 4, 2048, True),
    layers=2,
)  # fmt: skip


def chosen_cases(*, on_gpu: bool, pattern: str | None) -> tuple[Case, ...]:
    """The device's list, or those whose name holds one of the patterns, a comma between (`*` and `?` as in files)."""
    every = GPU_CASES if on_gpu else CPU_CASES
    wanted = [one.strip() for one in (pattern or "").split(",") if one.strip()] or [""]
    return tuple(case for case in every if any(fnmatch(case.name, f"*{one}*") for one in wanted))


def case_named(name: str) -> Case:
    """The case of any list that is called so."""
    return next(case for case in (*CPU_CASES, *GPU_CASES, *WIDE_CASES) if case.name == name)
