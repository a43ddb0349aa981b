"""What packing gains: real tokens a second on WordNet's rows, beside a plain trl script that pads, in turn, in one run.

    python -m benchmarks.packing                    about six minutes a pair on two cores
    python -m benchmarks.packing --pairs 5 --rows 64 --defaults

Every measurement is a process of its own. Both train all weights of one small Llama (3 layers, hidden size 640, the
demo tokenizer's vocabulary) in fp32 on about the same rows a step. The plain side is trl's SFTTrainer without packing:
rows padded to the longest of their batch, with checkpointing off as on our side, so that packing is the only
difference; `--defaults` adds trl's own default, which recomputes. Padding counts on neither side; the first step is
left out. The gain grows with the rows of a batch, since the longest of more rows is longer: padding makes WordNet's
rows 1.28 times as long in eights, 1.61 in batches of 64, 1.73 of 128 and 1.85 of 256.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.overhead import run, steady_speed
from benchmarks.wordnet import write_rows

TOKENIZER = Path("models/SmolLM2-135M-Instruct")
LEAST = 1.5
DATA_ROWS = 8000
MEAN_TOKENS = 58.7
CAPACITY = 512
SIDES = ("same settings", "trl's defaults")


def main() -> int:
    """Measure in turn and print each ratio and their medians."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--pairs", type=int, default=1)
    options.add_argument("--rows", type=int, default=128, help="rows a step on the plain side")
    options.add_argument("--defaults", action="store_true", help="measure trl's defaults too")
    options.add_argument("--plain", nargs=2, metavar=("RUN_JSON", "SIDE"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.plain:
        return plain(Path(chosen.plain[0]), chosen.steps, chosen.rows, default=chosen.plain[1] == SIDES[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        write_rows(folder / "rows.jsonl", DATA_ROWS)
        write_config(folder, packs=round(chosen.rows * MEAN_TOKENS / CAPACITY), steps=chosen.steps)
        measured = [measure(folder, chosen, number) for number in range(chosen.pairs)]
    return report(measured)


def make_model(folder: Path) -> None:
    """A random model in which attention and products weigh, beside the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    shape = {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 10}
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=10, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_config(folder: Path, *, packs: int, steps: int) -> None:
    values: dict[str, Any] = {
        "model": {"name": str(folder / "model"), "max_seq_len": CAPACITY, "dtype": "fp32"},
        "tuning": {"mode": "full"},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"batch_size": packs, "grad_accum": 1, "max_steps": steps, "gradient_checkpointing": False},
        "run": {"output_dir": str(folder / "runs")},
    }
    values["train"] |= {"bf16": False, "eval_strategy": "no", "save_strategy": "no"}
    (folder / "packing.yaml").write_text(json.dumps(values))  # JSON is YAML


def measure(folder: Path, chosen: argparse.Namespace, number: int) -> dict[str, float]:
    """Tokens a second of each side, one right after the other."""
    kept = {key: value for key, value in os.environ.items() if key not in ("ARGS", "SFT_PLAY_MAKE_VARIABLES")}
    environ = {**kept, "CONFIG": str(folder / "packing.yaml"), "DATA_PACKING": "true", "CUDA_VISIBLE_DEVICES": ""}
    run([sys.executable, "-m", "sft_play", "train"], {**environ, "RUN_NAME": f"packed-{number}"})
    events = (folder / f"runs/packed-{number}/metrics.jsonl").read_text().splitlines()
    found = {"packed": steady_speed([json.loads(line) for line in events])}
    # The plain side reads the same tokens, prepared without packing: one step of a run that is thrown away.
    unpacked = folder / "runs/unpacked/run.json"
    if not unpacked.exists():
        once = {"DATA_PACKING": "false", "TRAIN_MAX_STEPS": "1", "TRAIN_BATCH_SIZE": "1", "RUN_NAME": "unpacked"}
        run([sys.executable, "-m", "sft_play", "train"], {**environ, **once})
    numbers = ["--steps", str(chosen.steps), "--rows", str(chosen.rows)]
    for side in SIDES[: 1 + chosen.defaults]:
        command = [sys.executable, "-m", "benchmarks.packing", *numbers, "--plain", str(unpacked), side]
        found[side] = json.loads(run(command, environ).splitlines()[-1])
    return found


def plain(run_json: Path, steps: int, rows: int, *, default: bool) -> int:
    """Training with nothing but transformers and trl, its collator and its padding."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    job = json.loads(run_json.read_text())
    events: list[dict[str, Any]] = []

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):  # type: ignore[no-untyped-def]
            if "loss" in logs:
                events.append({"event": "train", "time": time.time(), **logs})

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model_path"], dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(run_json.parent.parent / "plain"),
            per_device_train_batch_size=rows,
            max_steps=steps,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            **({} if default else {"gradient_checkpointing": False, "optim": "adamw_torch"}),
        ),
        train_dataset=Dataset.from_file(job["splits"]["train"]).select_columns(["input_ids", "labels"]),
        processing_class=AutoTokenizer.from_pretrained(job["model_path"]),
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps(steady_speed(events)))
    return 0


def report(measured: list[dict[str, float]]) -> int:
    """A line a round, the medians of the ratios and the verdict; 1 where the bound is missed."""
    medians = {}
    for side in [side for side in SIDES if side in measured[0]]:
        print(f"real tokens/s   packed   padded, {side}   ratio")
        ratios = [found["packed"] / found[side] for found in measured]
        for number, (found, ratio) in enumerate(zip(measured, ratios, strict=True), 1):
            print(f"round {number:<6}  {found['packed']:>8,.0f}   {found[side]:>21,.0f}   {ratio:>5.2f}")
        medians[side] = statistics.median(ratios)
        print(f"median ratio: {medians[side]:.2f}\n")
    met = medians[SIDES[0]] >= LEAST
    print(f"{'reached' if met else 'missed'}: at least {LEAST} by packing alone")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
