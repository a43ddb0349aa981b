"""The other side of `make bench`: a run of ours again, by nothing but transformers, peft and trl's own preparation.

    python -m benchmarks.bench_plain RUN.json STEPS ROWS_A_STEP RESULT.json

It reads the same rows with the same tokenizer, and takes precision, attention, optimizer and checkpointing from the
plan of that run; loss, kernels, padding and all else are trl's own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(run_json: Path, steps: int, rows: int, result: Path) -> int:
    """Train and leave the logged steps with their clock, and the peak of memory in bytes."""
    import resource

    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTTrainer

    job = json.loads(run_json.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = []

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                events.append({"event": "train", "time": time.time(), **logs})

    data = load_dataset("json", data_files=job["config"]["data"]["train"], split="train", cache_dir=str(result.parent))
    trainer = SFTTrainer(
        model=load_model(job),
        args=arguments(job, steps, rows, result.parent / "plain"),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(job["model_path"]),
        peft_config=adapter(job),
        callbacks=[Clock()],
    )
    trainer.train()
    on_gpu = job["plan"]["device"] == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident
    result.write_text(json.dumps({"events": events, "peak_bytes": peak}), encoding="utf-8")
    return 0


def load_model(job: dict[str, Any]) -> Any:
    """The base as the plan has it, in 4 bits for QLoRA."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config, plan = job["config"], job["plan"]
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "none": torch.float32}
    packed = None
    if config["tuning"]["mode"] == "qlora":
        kind = config["tuning"]["quantization"]
        packed = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind["type"],
            bnb_4bit_use_double_quant=kind["double"],
            bnb_4bit_compute_dtype=dtypes[plan["autocast"]],
        )
    return AutoModelForCausalLM.from_pretrained(
        job["model_path"],
        dtype=dtypes[plan["dtype"]],
        attn_implementation=plan["attention"],
        quantization_config=packed,
        device_map={"": 0} if plan["device"] == "cuda" else None,
    )


def adapter(job: dict[str, Any]) -> Any:
    """The run's LoRA; None where every weight is trained."""
    from peft import LoraConfig

    if job["config"]["tuning"]["mode"] == "full":
        return None
    lora = job["config"]["tuning"]["lora"]
    return LoraConfig(
        task_type="CAUSAL_LM", r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target_modules"]
    )


def arguments(job: dict[str, Any], steps: int, rows: int, output: Path) -> Any:
    """trl's settings: the plan's where it speaks of them, else trl's defaults."""
    from trl import SFTConfig

    train, plan = job["config"]["train"], job["plan"]
    return SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=plan["grad_accum"],
        learning_rate=train["learning_rate"],
        lr_scheduler_type=train["scheduler"],
        warmup_steps=train["warmup"],
        optim=plan["optimizer"],
        max_steps=steps,
        bf16=plan["autocast"] == "bf16",
        fp16=plan["autocast"] == "fp16",
        gradient_checkpointing=bool(plan["gradient_checkpointing"]),
        dataloader_pin_memory=plan["pin_memory"],
        use_cpu=plan["device"] == "cpu",
        seed=train["seed"],
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        report_to="tensorboard",  # as ours does
        disable_tqdm=True,
        max_length=job["config"]["model"]["max_seq_len"],
    )


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
