"""The table that `benchmarks/measure.py` appends to: the measured-runs columns, then predictions and origin."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "id", "kind", "outcome", "model", "parameters_billion", "method", "quantization", "lora_r", "lora_targets",
    "optimizer", "param_dtype", "state_notes", "micro_batch", "seq_len", "seq_kind", "gradient_checkpointing",
    "attention", "loss", "kernels", "compile", "gpus", "strategy", "offload", "gpu", "mem_kind",
    "measured_gib_per_gpu", "allocated_gib", "reserved_gib", "device_gib", "tokens_per_second", "tokens_scope",
    "mfu_percent", "confidence", "source", "notes",
    "predicted_allocated_gib", "predicted_reserved_gib", "predicted_device_gib", "predicted_tokens_per_second",
    "predicted_mfu_percent", "predicted_fits", "commit", "date", "versions",
)  # fmt: skip


def append_row(path: Path, row: dict[str, str]) -> None:
    """One more row; the header too where the file is new."""
    new = not path.is_file() or not path.stat().st_size
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def rows_in(path: Path) -> int:
    """Rows that are there already.

    Raises:
        SystemExit: the file is a table of other columns.
    """
    return len(_read(path))


def cases_in(path: Path) -> frozenset[str]:
    """Names of the cases that have a row already, whatever their outcome.

    Raises:
        SystemExit: the file is a table of other columns.
    """
    return frozenset(_case_of(row) for row in _read(path))


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file() or not path.stat().st_size:
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} has other columns; name a new file")
        return list(reader)


def short_table(rows: Sequence[dict[str, str]]) -> str:
    """Measured and predicted side by side, a line a case."""
    head = ["case", "outcome", "GiB", "plan", "device", "plan", "tokens/s", "plan", "MFU %", "plan"]
    keys = ("outcome", "measured_gib_per_gpu", "predicted_allocated_gib", "device_gib", "predicted_device_gib",
            "tokens_per_second", "predicted_tokens_per_second", "mfu_percent", "predicted_mfu_percent")  # fmt: skip
    lines = [head, *([_case_of(row), *(row[key] or "-" for key in keys)] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in
                  enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def _case_of(row: dict[str, str]) -> str:
    return row["notes"].split(";")[0].removeprefix("case ")
