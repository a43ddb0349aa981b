"""Time to the first optimizer step on two ranks, beside a plain trl script that torchrun starts, in turn, in one run.

    python -m benchmarks.start --pairs 5
    python -m benchmarks.start --config configs/demo.yaml

Ours is measured from `make` on, with the data already prepared, as it is from the second start on, and from nothing
(`--cold`); the plain script tokenises its rows in each rank, as such scripts do. Each measurement is a process of its
own. The exit code is 1 where the median ratio is above the bound.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

CONFIG = "configs/demo.yaml"
SLOWEST = 1.3
RANKS = 2
STEPPED = "first step done"


def main() -> int:
    """Measure pairs in turn and print each ratio and their median."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--config", default=CONFIG)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--cold", action="store_true", help="ours prepares its data each time")
    options.add_argument("--plain", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.plain:
        return plain(Path(chosen.plain))
    config = Path(chosen.config)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if not chosen.cold:
            start_ours(config, folder / "runs", "warm")
        rows = []
        for number in range(chosen.pairs):
            ours = start_ours(config, folder / (f"cold-{number}" if chosen.cold else "runs"), f"run-{number}")
            rows.append((ours, start_plain(config)))
            print(f"ours {ours:.2f} s, plain {rows[-1][1]:.2f} s, ratio {ours / rows[-1][1]:.3f}", flush=True)
    median = statistics.median(ours / other for ours, other in rows)
    print(f"time to the first step, {RANKS} ranks: median ratio {median:.3f} (bound {SLOWEST})")
    return int(median > SLOWEST)


def start_ours(config: Path, output: Path, name: str) -> float:
    """Seconds from `make` to the line of the first step."""
    words = [
        "make", "-s", "train-distributed", f"CONFIG={config}", f"NUM_GPUS={RANKS}", "TRAIN_BATCH_SIZE=1",
        "TRAIN_GRAD_ACCUM=1", "TRAIN_GLOBAL_BATCH_SIZE=2", "TRAIN_MAX_STEPS=1", "TRAIN_EVAL_STRATEGY=no",
        "TRAIN_EVAL_ON_START=false", "TRAIN_SAVE_STRATEGY=no", f"RUN_OUTPUT_DIR={output}", f"RUN_NAME={name}",
    ]  # fmt: skip
    return seconds_until(words, "step 1/1")


def start_plain(config: Path) -> float:
    """Seconds from torchrun to the line that the plain script prints after its first step."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return seconds_until([*words, "-m", "benchmarks.start", "--plain", str(config)], STEPPED)


def seconds_until(words: list[str], line: str) -> float:
    """Start a command and stop the clock at the first line that holds `line`; the command is then ended.

    Raises:
        RuntimeError: it ended without that line.
    """
    environ = {key: value for key, value in os.environ.items() if key not in ("ARGS", "MAKELEVEL", "MAKEFLAGS")}
    environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    process = subprocess.Popen(
        words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said = []
    for text in process.stdout:
        said.append(text)
        if line in text:
            taken = time.monotonic() - began
            process.communicate()
            return taken
    process.wait()
    os.killpg(process.pid, signal.SIGKILL)
    raise RuntimeError(f"{' '.join(words[:4])}: ended without {line!r}: {''.join(said[-5:])}")


def plain(config: Path) -> int:
    """What one would write without this toolkit: the same model, rows, method and batch."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Told(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            print(STEPPED, flush=True)

    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    lora = settings["tuning"].get("lora", {})
    rows = load_dataset("json", data_files=settings["data"]["train"], split="train")
    trainer = SFTTrainer(
        model=settings["model"]["name"],
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=1,
            max_steps=1,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            max_length=settings["model"]["max_seq_len"],
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "bfloat16"},
        ),
        train_dataset=rows,
        peft_config=LoraConfig(r=lora.get("r", 16), lora_alpha=lora.get("alpha", 32), target_modules="all-linear"),
        callbacks=[Told()],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
