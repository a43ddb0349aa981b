"""How long the data of 117,659 chat rows takes to prepare, beside a plain loop and trl's own preparation.

    python -m benchmarks.preparation --model models/SmolLM2-135M-Instruct

Each side is a process of its own, one after the other, in one run. `plain` only renders and tokenises, a row at a time
into the template and a thousand at a time into the tokenizer, with the same libraries; `ours` also finds every fault,
masks, proves, counts and writes; `trl` is what SFTTrainer does with the rows when it is made, without masks.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.wordnet import write_rows

SIDES = ("plain", "ours", "ours, cached", "trl")
PLAIN_FACTOR, SECONDS, CACHED_SECONDS, BYTES = 2.5, 30.0, 1.0, 1.5e9


def main() -> int:
    """Measure every side and compare with the bounds; 1 where one is missed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    options.add_argument("--limit", type=int, help="rows, by default all")
    options.add_argument("--side", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.side:
        return report_side(chosen.side[0], Path(chosen.side[1]), chosen.model.resolve())
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "rows.jsonl", chosen.limit)
        found = {side: measure(side, Path(folder), chosen.model.resolve()) for side in SIDES}
    print(f"{rows:,} rows\n\n| | seconds | of plain | peak memory |\n|---|---:|---:|---:|")
    for side, one in found.items():
        share = one["seconds"] / found["plain"]["seconds"]
        print(f"| {side} | {one['seconds']:.1f} | {share:.2f} | {one['peak_bytes'] / 1e6:,.0f} MB |")
    ours, cached = found["ours"], found["ours, cached"]
    held = {
        f"at most {PLAIN_FACTOR} x plain": ours["seconds"] <= PLAIN_FACTOR * found["plain"]["seconds"],
        f"under {SECONDS:.0f} s": ours["seconds"] < SECONDS,
        "trl is slower": ours["seconds"] < found["trl"]["seconds"],
        f"under {BYTES / 1e9} GB": ours["peak_bytes"] < BYTES,
        f"from the cache under {CACHED_SECONDS:.0f} s": cached["seconds"] < CACHED_SECONDS,
    }
    print("\n" + "\n".join(f"{name}: {'yes' if yes else 'NO'}" for name, yes in held.items()))
    return 0 if all(held.values()) else 1


def measure(side: str, folder: Path, model: Path) -> dict[str, float]:
    """Seconds and peak resident bytes of one side in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.preparation", "--model", str(model), "--side", side, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report_side(side: str, folder: Path, model: Path) -> int:
    """Run one side here and print what it took."""
    run = {"plain": plain, "trl": trl}.get(side, ours)
    seconds = run(folder, model)
    print(json.dumps({"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
    return 0


def plain(folder: Path, model: Path) -> float:
    """Render and tokenise, and nothing else."""
    from sft_play.data.template import load_text_tokenizer

    tokenizer = load_text_tokenizer(model)
    template = tokenizer.need_template()
    started, texts, tokens = time.monotonic(), [], 0
    with (folder / "rows.jsonl").open(encoding="utf-8") as stream:
        for line in stream:
            texts.append(template.render(json.loads(line)["messages"]))
            if len(texts) == 1000:
                tokens += sum(len(one.ids) for one in tokenizer.tokenizer.encode_batch(texts))
                texts.clear()
        tokens += sum(len(one.ids) for one in tokenizer.tokenizer.encode_batch(texts))
    return time.monotonic() - started


def ours(folder: Path, model: Path) -> float:
    """`prepare`, from nothing or from the cache that the call before left."""
    from sft_play.config.schema import Config
    from sft_play.data.prepare import prepare

    values = {"model": {"name": str(model)}, "data": {"train": str(folder / "rows.jsonl")}}
    started = time.monotonic()
    prepare(Config.model_validate(values), model, folder / "cache", lambda line: None)
    return time.monotonic() - started


def trl(folder: Path, model: Path) -> float:
    """The rows through SFTTrainer's constructor, less what it takes with one row."""
    import os

    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).to(torch.float32)
    arguments = SFTConfig(output_dir=str(folder / "out"), report_to="none", use_cpu=True, max_length=2048, bf16=False)

    def made(rows: object) -> float:
        started = time.monotonic()
        SFTTrainer(model=tiny, args=arguments, train_dataset=rows, processing_class=tokenizer)
        return time.monotonic() - started

    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    return -made(rows.select(range(1))) + made(rows)


if __name__ == "__main__":
    sys.exit(main())
