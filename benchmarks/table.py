"""Rows of a table of measured runs -> what the plan takes: model facts, settings and hardware."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.hardware import Hardware, describe_hardware, find_gpu
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.settings import (
    Attention,
    Checkpointing,
    Dtype,
    Kernels,
    Loss,
    Method,
    Offload,
    Optimizer,
    Placement,
    Settings,
)

GPUS_A_NODE = 8
# Before transformers 4.46 these computed their loss on 16-bit logits; the published runs are of that time.
OLD_LOSSES = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "falcon"})


class RowProblem(Exception):
    """A row that cannot be predicted; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run and the inputs to predict it."""

    row: dict[str, str]
    family: str
    facts: ModelFacts
    settings: Settings
    hardware: Hardware

    @property
    def id(self) -> str:
        return self.row["id"]

    def figure(self, column: str) -> float | None:
        """A measured number, or None where the row has none."""
        text = self.row.get(column, "").strip()
        return float(text) if text else None


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a CSV table in the columns of the measured runs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)]


def family_of(row: dict[str, str]) -> str:
    """The id's prefix and the model: rows of one family differ in batch, GPUs and kernels only.

    The prefix is the id less a trailing three-digit number (`source-table-012`), else its first word.
    """
    counted = re.fullmatch(r"(.+)-\d{3}", row["id"])
    prefix = counted[1] if counted else row["id"].split("-")[0]
    return f"{prefix} {row['model'].split('/')[-1]}"


def read_run(row: dict[str, str]) -> Run:
    """Inputs to predict a row.

    Raises:
        RowProblem: a model, GPU or setting that the plan does not know.
    """
    try:
        facts = read_model_facts(row["model"])
    except ModelError as error:
        raise RowProblem(f"unknown model {row['model']}") from error
    gpu = find_gpu(row["gpu"])
    if gpu is None:
        raise RowProblem(f"unknown GPU {row['gpu']!r}")
    count = _whole(row, "gpus")
    nodes = max(1, count // GPUS_A_NODE)
    hardware = describe_hardware(gpu, count=count // nodes, nodes=nodes)
    return Run(row=row, family=family_of(row), facts=facts, settings=_settings(row, facts), hardware=hardware)


def _settings(row: dict[str, str], facts: ModelFacts) -> Settings:
    placement, tensor_parallel = _placement(row)
    notes = f"{row.get('state_notes', '')} {row.get('param_dtype', '')}".lower()
    method = _choice(row, "method", {"full": Method.FULL, "lora": Method.LORA, "qlora": Method.QLORA})
    kernels = _kernels(row)
    own = kernels in {Kernels.TORCHTUNE, Kernels.TORCHTITAN}
    return Settings(
        method=method,
        micro_batch=_whole(row, "micro_batch"),
        seq_len=_whole(row, "seq_len"),
        param_dtype=_param_dtype(notes, method),
        master_weights=method is Method.FULL and placement.value.startswith("zero") and "pure bf16" not in notes,
        adapter_dtype=Dtype.BF16 if "pure bf16" in notes else Dtype.FP32,
        double_quantized=row.get("quantization") == "nf4-double" or own,
        upcast="fp32 upcast" in row.get("kernels", ""),
        loss_upcast=facts.model_type not in OLD_LOSSES,
        lora_r=_whole(row, "lora_r") if row.get("lora_r") else 16,
        lora_targets=_targets(row),
        checkpointing=_checkpointing(row),
        attention=_attention(row),
        loss=_choice(row, "loss", {"full": Loss.FULL, "chunked": Loss.CHUNKED, "fused": Loss.FUSED}),
        kernels=kernels,
        compile=row.get("compile") == "yes",
        placement=placement,
        gpus=_whole(row, "gpus"),
        tensor_parallel=tensor_parallel,
        sequence_parallel=kernels is Kernels.TORCHTITAN,
        fsdp2=own or row["strategy"].lower() == "fsdp2",
        expandable_segments=own,  # both libraries' launch commands set it
        offload=Offload.PARAMS if row.get("offload") == "params" else Offload.NONE,
        offload_activations="activations" in row.get("offload", ""),
        **_optimizer(row),  # type: ignore[arg-type]
    )


def _param_dtype(notes: str, method: Method) -> Dtype:
    """Full fine-tuning of fp32 weights, under autocast or FSDP's mixed precision, is said in the notes."""
    fp32 = "fp32 sharded" in notes or notes.rsplit(" ", 1)[-1] in {"float32", "fp32"}
    return Dtype.FP32 if fp32 and method is Method.FULL else Dtype.BF16


def _optimizer(row: dict[str, str]) -> dict[str, object]:
    name = row.get("optimizer", "").lower()
    in_backward = "optimizer_in_bwd" in name
    if "8bit" in name:
        kind = Optimizer.PAGED_ADAMW_8BIT if "paged" in name else Optimizer.ADAMW_8BIT
        return {"optimizer": kind, "optimizer_in_backward": in_backward}
    if "adafactor" in name:
        return {"optimizer": Optimizer.ADAFACTOR}
    if "sgd" in name:
        return {"optimizer": Optimizer.SGD}
    if "adam" in name or "lora-fa" in name:
        kind = Optimizer.PAGED_ADAMW if "paged" in name else Optimizer.ADAMW
        return {
            "optimizer": kind,
            "foreach": "fused" not in name and not in_backward,
            "optimizer_in_backward": in_backward,
        }
    raise RowProblem(f"unknown optimizer {row.get('optimizer')!r}")


def _placement(row: dict[str, str]) -> tuple[Placement, int]:
    name = row["strategy"].strip()
    if match := re.fullmatch(r"other:FSDP(\d+) TP(\d+)", name):
        return Placement.FSDP, int(match[2])
    plain = re.sub(r"^(deepspeed|fsdp[12]$)[ -]*", lambda m: "fsdp" if m[1].startswith("fsdp") else "", name.lower())
    try:
        return Placement(plain.replace("-", "").replace("layersplit", "layer_split")), 1
    except ValueError as error:
        raise RowProblem(f"unknown strategy {name!r}") from error


def _checkpointing(row: dict[str, str]) -> Checkpointing:
    text = row["gradient_checkpointing"].lower()
    if text in {"yes", "full", "true", "unsloth"}:
        return Checkpointing.FULL
    if text in {"no", "none", "false", ""}:
        return Checkpointing.NONE
    if "sac" in text or "selective" in text:
        return Checkpointing.SELECTIVE
    raise RowProblem(f"unknown gradient_checkpointing {text!r}")


def _kernels(row: dict[str, str]) -> Kernels:
    text = row.get("kernels", "").lower()
    if row["id"].startswith("titan"):
        return Kernels.TORCHTITAN
    if "cewithchunkedoutputloss" in text or "torchtune" in row.get("source", ""):
        return Kernels.TORCHTUNE
    for kind in (Kernels.UNSLOTH, Kernels.LIGER, Kernels.TRITON):
        if kind.value in text:
            return kind
    if text.startswith("hf") or text in {"", "n", "none", "no"}:
        return Kernels.HF
    raise RowProblem(f"unknown kernels {text!r}")


def _attention(row: dict[str, str]) -> Attention:
    text = row.get("attention", "").lower()
    for word, kind in (("eager", Attention.EAGER), ("flash_attention", Attention.FLASH), ("sdpa", Attention.SDPA)):
        if word in text:
            return kind
    return Attention.FLEX if "flex" in text else Attention.SDPA


def _targets(row: dict[str, str]) -> tuple[str, ...]:
    text = row.get("lora_targets", "")
    if text in {"", "all-linear", "all"}:
        return ("all-linear",)
    short = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    names = [short.get(word, word) for word in text.replace("+", " ").replace(",", " ").split()]
    if "mlp" in names:
        names = [name for name in names if name != "mlp"] + ["gate_proj", "up_proj", "down_proj"]
    return tuple(names)


def _choice(row: dict[str, str], column: str, table: dict[str, Any]) -> Any:
    try:
        return table[row[column].lower()]
    except KeyError as error:
        raise RowProblem(f"unknown {column} {row.get(column)!r}") from error


def _whole(row: dict[str, str], column: str) -> int:
    try:
        return int(float(row[column]))
    except (KeyError, ValueError) as error:
        raise RowProblem(f"no number in {column}: {row.get(column)!r}") from error
