"""What the toolkit costs: its training beside a plain trl script with the same settings, in turn, in one run.

    make bench-overhead                 the demo's model and data
    python -m benchmarks.overhead --steps 20 --pairs 3

Each measurement is a process of its own. Both sides train the same tokens in the same order: the plain side
reads the prepared rows. Speed is real tokens over the time of the steps (the first one left out), memory the
largest resident set (CPU) or the peak allocated (GPU).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = "configs/demo.yaml"
SLOWEST, LARGEST = 0.97, 1.05


def main() -> int:
    """Measure pairs in turn and print each ratio and their median."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--plain", nargs=2, metavar=("RUN_JSON", "STEPS"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.plain:
        return plain(Path(chosen.plain[0]), int(chosen.plain[1]))
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure_pair(Path(folder) / f"pair-{number}", chosen.steps) for number in range(chosen.pairs)]
    return report(rows)


def measure_pair(folder: Path, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """(ours, plain), one process each, one right after the other."""
    settings = {
        "CONFIG": CONFIG,
        "TRAIN_MAX_STEPS": str(steps),
        "TRAIN_EVAL_STRATEGY": "no",
        "TRAIN_EVAL_ON_START": "false",
        "TRAIN_SAVE_STRATEGY": "no",
        "RUN_OUTPUT_DIR": str(folder),
        "RUN_NAME": "ours",
    }
    environ = {key: value for key, value in os.environ.items() if key not in ("ARGS", "SFT_PLAY_MAKE_VARIABLES")}
    run([sys.executable, "-m", "sft_play", "train"], {**environ, **settings})
    job = folder / "ours" / "run.json"
    times = [json.loads(line) for line in (job.parent / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((job.parent / "record.json").read_text())
    ours = {"tokens_per_second": steady_speed(times), "peak_bytes": record["peak_memory_bytes"]}
    output = run([sys.executable, "-m", "benchmarks.overhead", "--plain", str(job), str(steps)], environ)
    return ours, json.loads(output.splitlines()[-1])


def steady_speed(events: list[dict[str, float]]) -> float:
    """Real tokens a second from the end of the first step to the end of the last, by the log's clock."""
    steps = [event for event in events if event["event"] == "train"]
    return (steps[-1]["num_tokens"] - steps[0]["num_tokens"]) / (steps[-1]["time"] - steps[0]["time"])


def run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def plain(run_json: Path, steps: int) -> int:
    """The same training with nothing but transformers, peft and trl."""
    import resource
    import time

    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    job = json.loads(run_json.read_text())
    config, plan = job["config"], job["plan"]
    set_seed(config["train"]["seed"])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan["dtype"]]
    on_gpu = plan["device"] == "cuda"
    model = AutoModelForCausalLM.from_pretrained(
        job["model_path"], dtype=dtype, attn_implementation=plan["attention"], device_map={"": 0} if on_gpu else None
    )
    lora = config["tuning"]["lora"]
    adapter = LoraConfig(
        task_type="CAUSAL_LM", r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target_modules"]
    )
    events = []

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):  # type: ignore[no-untyped-def]
            if "loss" in logs:
                events.append({"event": "train", "time": time.time(), **logs})

    trainer = SFTTrainer(
        model=get_peft_model(model, adapter),
        args=SFTConfig(
            output_dir=str(run_json.parent.parent / "plain"),
            per_device_train_batch_size=plan["micro_batch"],
            gradient_accumulation_steps=plan["grad_accum"],
            learning_rate=config["train"]["learning_rate"],
            lr_scheduler_type=config["train"]["scheduler"],
            warmup_steps=config["train"]["warmup"],
            optim=plan["optimizer"],
            max_steps=steps,
            bf16=plan["autocast"] == "bf16",
            fp16=plan["autocast"] == "fp16",
            gradient_checkpointing=plan["gradient_checkpointing"],
            dataloader_pin_memory=plan["pin_memory"],
            use_cpu=not on_gpu,
            seed=config["train"]["seed"],
            save_strategy="no",
            eval_strategy="no",
            logging_steps=1,
            logging_first_step=True,
            report_to="tensorboard",  # as ours does
            disable_tqdm=True,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_file(job["splits"]["train"]),
        processing_class=AutoTokenizer.from_pretrained(job["model_path"]),
        callbacks=[Clock()],
    )
    trainer.train()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident
    print(json.dumps({"tokens_per_second": steady_speed(events), "peak_bytes": peak, "loss": events[-1]["loss"]}))
    return 0


def report(rows: list[tuple[dict[str, float], dict[str, float]]]) -> int:
    """A line a pair, the medians of the ratios and the verdict; 1 where a bound is missed."""
    print("pair   tokens/s ours   plain   ratio    peak GiB ours   plain   ratio")
    speeds, peaks = [], []
    for number, (ours, other) in enumerate(rows, 1):
        speeds.append(ours["tokens_per_second"] / other["tokens_per_second"])
        peaks.append(ours["peak_bytes"] / other["peak_bytes"])
        print(
            f"{number:>4}   {ours['tokens_per_second']:>13.1f}  {other['tokens_per_second']:>6.1f}  {speeds[-1]:>6.3f}"
            f"    {ours['peak_bytes'] / 2**30:>13.2f}  {other['peak_bytes'] / 2**30:>6.2f}  {peaks[-1]:>6.3f}"
        )
    speed, peak = statistics.median(speeds), statistics.median(peaks)
    met = speed >= SLOWEST and peak <= LARGEST
    print(f"median ratio: speed {speed:.3f} (at least {SLOWEST}), memory {peak:.3f} (at most {LARGEST})")
    print("within bounds" if met else "out of bounds")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
