"""What a checkpoint costs: our whole save beside the plain Trainer's, of the demo's size, in turn, in one process.

    python -m benchmarks.checkpoint --rounds 21

Ours writes, hashes, describes and publishes while training waits, and syncs and rotates in a thread; the Trainer's
writes and rotates. Both write the same adapter (4.9 million trained weights) and AdamW state to the same disk. No model
of 135M weights is needed for that: a small one with an adapter of that size writes the same bytes.

A bare write of as many bytes into one file goes beside them, as a control. Where the machine is a guest whose host
takes unused memory back, a write that gets such memory for the page cache takes up to ten times as long, whoever
writes. That only ever adds, and at random, so the ratio is of the least times, as the documentation of `timeit`
advises; the medians are printed too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer
from trl import SFTConfig, SFTTrainer

from sft_play.record.run_dir import RunDir
from sft_play.runtime.trainer import SftPlayTrainer
from tests.tiny import make_model

MOST = 1.3
KEPT = 2
BLOCK = os.urandom(1 << 20)
# SmolLM2-135M's shape under a small vocabulary; rank 16 on all linear layers.
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}


def main() -> int:
    """Save by turns and print the times and their ratio; 1 where ours costs too much."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=21)
    rounds = options.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        ours, plain = trainers(Path(place))
        bare = Path(place) / "bare"
        bare.mkdir()
        saves = {
            "ours": lambda: ours._save_checkpoint(ours.model, None),
            "plain": lambda: save_plain(plain),
            "bare": lambda: save_bare(bare, plain.state.global_step, written),
        }
        written, settling = 0, list[float]()
        taken: dict[str, list[float]] = {name: [] for name in saves}
        for number, order in zip(range(rounds + 1), itertools.cycle(itertools.permutations(saves)), strict=False):
            for name in order:
                ours.state.global_step = plain.state.global_step = number + 1
                seconds = timed(saves[name])
                after = timed(ours.settling.wait, settled=False)
                if number:  # the first of each warms up
                    taken[name].append(seconds)
                    settling += [after] if name == "ours" else []
            written = sum(file.stat().st_size for file in (ours.run.checkpoints / f"step-{number + 1}").rglob("*"))
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"{name:<6} least {min(seconds):.3f} s, median {middle:.3f}, most {max(seconds):.3f}")
    print(f"until it was on the disk and older ones gone, training already: {statistics.median(settling):.3f} s more")
    ratio = min(taken["ours"]) / min(taken["plain"])
    medians = statistics.median(taken["ours"]) / statistics.median(taken["plain"])
    print(
        f"{written / 2**20:.1f} MiB a checkpoint, {rounds} rounds: ratio {ratio:.2f} (at most {MOST}), "
        f"of the medians {medians:.2f}"
    )
    return 0 if ratio <= MOST else 1


def timed(save: Callable[[], None], *, settled: bool = True) -> float:
    """Seconds of a call; nobody pays for what another left to be written, if the disk is to be `settled` before."""
    if settled:
        os.sync()
    started = time.perf_counter()
    save()
    return time.perf_counter() - started


def save_bare(folder: Path, step: int, size: int) -> None:
    """What the machine takes for the bytes alone: one file of about `size` bytes, the one before the last deleted."""
    with (folder / str(step)).open("wb") as stream:
        for _ in range(size >> 20):
            stream.write(BLOCK)
    (folder / str(step - KEPT)).unlink(missing_ok=True)


def save_plain(trainer: Trainer) -> None:
    Trainer._save_checkpoint(trainer, trainer.model, None)


def trainers(place: Path) -> tuple[Any, Any]:
    """Ours and trl's over the same kind of model, after one step each: AdamW has its state."""
    run = RunDir(place / "runs/ours")
    run.create()
    folder = make_model(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stamp = {"version": 2, "strategy": "single"}
    rows = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2)
    made = []
    for build in (SftPlayTrainer, SFTTrainer):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=3, **SHAPE))
        adapter = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
        arguments = SFTConfig(
            output_dir=str(place / build.__name__), max_steps=1, per_device_train_batch_size=1, use_cpu=True,
            bf16=False, save_strategy="no", report_to="none", disable_tqdm=True, max_length=None,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            save_total_limit=KEPT if build is SFTTrainer else None,
        )  # fmt: skip
        settings = {
            "model": get_peft_model(model, adapter), "args": arguments, "train_dataset": rows,
            "processing_class": tokenizer,
        }  # fmt: skip
        made.append(build(run, stamp, **settings) if build is SftPlayTrainer else build(**settings))
    for trainer in made:
        optimizer = trainer.create_optimizer()
        trainer.create_scheduler(1)
        for weight in trainer.model.parameters():
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        optimizer.step()
    made[0].save_limit, made[0].evaluation = KEPT, SimpleNamespace()
    return made[0], made[1]


if __name__ == "__main__":
    raise SystemExit(main())
