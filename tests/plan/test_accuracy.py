"""benchmarks/plan_accuracy.py on a table of its own: figures, report, and rows that cannot be predicted."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {
    "outcome": "ok", "model": "mistralai/Mistral-7B-v0.1", "method": "lora", "quantization": "none", "lora_r": "16",
    "lora_targets": "q_proj k_proj v_proj o_proj", "optimizer": "adamw_torch (HF default)", "param_dtype": "bfloat16",
    "micro_batch": "8", "seq_len": "4096", "gradient_checkpointing": "yes", "attention": "flash_attention_2",
    "loss": "full", "kernels": "HF eager", "compile": "no", "gpus": "1", "strategy": "single", "offload": "none",
    "gpu": "A100-80GB-SXM", "tokens_scope": "per-GPU", "source": "a test", "state_notes": "",
}  # fmt: skip
ROWS = [
    {**PLAIN, "id": "aa-1", "allocated_gib": "36.1", "device_gib": "42.2", "tokens_per_second": "3354"},
    {**PLAIN, "id": "aa-2", "micro_batch": "4", "allocated_gib": "24.9", "device_gib": "28.9"},
    {**PLAIN, "id": "bb-1", "micro_batch": "64", "outcome": "oom"},
    {**PLAIN, "id": "bb-2", "model": "nobody/nothing"},
    {**PLAIN, "id": "bb-3", "gpu": "Abacus 3000"},
    {**PLAIN, "id": "bb-4", "strategy": "telepathy"},
]


def test_the_report_counts_families_and_names_what_it_cannot_predict(tmp_path: Path) -> None:
    table, out = tmp_path / "runs.csv", tmp_path / "out.json"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=sorted({key for row in ROWS for key in row}))
        writer.writeheader()
        writer.writerows(ROWS)
    command = [sys.executable, "benchmarks/plan_accuracy.py", "--table", table, "--json", out, "--docs", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "3 rows not predicted" in done.stdout
    figures = json.loads(out.read_text())
    assert figures["version"] == 1
    assert figures["overall"]["rows"] == 3
    assert figures["overall"]["verdict_right"] == 1.0
    assert figures["overall"]["allocated"]["median"] < 0.1
    assert {line.split(":")[0] for line in figures["not_predicted"]} == {"bb-2", "bb-3", "bb-4"}
    assert "aa Mistral-7B-v0.1" in (tmp_path / "plan_accuracy.md").read_text()
    assert (tmp_path / "plan_accuracy.svg").read_text().startswith("<svg")
