"""Measure training runs on the device at hand and append them to a table, with what the plan predicted beside them.

    python benchmarks/measure.py --list
    python benchmarks/measure.py --cases qlora --out runs.csv --steps 8
    python benchmarks/measure.py --cases llama-1b,32b --total 560 --resume --out runs.csv

Cases (benchmarks/cases.py) are catalog architectures with random weights: memory and speed depend on the shapes
alone. Each runs in a process of its own (benchmarks/trial.py) under a time limit; one that fails or does not fit is
a row with that outcome, and every row is written as soon as it is known. Where time is short, `--total` ends the list
in time and names what is left, and `--resume` goes on with what the table does not hold yet. The columns are those of
the measured-runs table, which benchmarks/plan_accuracy.py reads, and the predictions after them. On a CPU the cases
are tiny, the memory figure is the growth of the resident set, and the rows say so: they show that the measuring works,
not how good the plan is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cases import Case, chosen_cases  # noqa: E402
from rows import COLUMNS, append_row, cases_in, rows_in, short_table  # noqa: E402

from sft_play.facts.hardware import GIB, Gpu, Hardware, LinkKind, describe_hardware, find_gpu  # noqa: E402
from sft_play.facts.probe import probe_hardware  # noqa: E402
from sft_play.plan.memory import Estimate  # noqa: E402
from sft_play.plan.speed import model_flops_per_token  # noqa: E402

STACK = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WEIGHTS = {
    ("full", "fp32"): "fp32 weights, gradients and Adam under bf16 autocast",
    ("full", "bf16"): "pure bf16 params+grads+Adam",
}
LAST_WORDS = 300


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case and what its process left: figures as `benchmarks/trial.py` writes them, or only how it ended."""

    case: Case
    figures: dict[str, Any]

    @property
    def outcome(self) -> str:
        return str(self.figures["outcome"])


# Less than this is not worth a case: the stack alone takes that long to import.
SHORTEST_CASE_SECONDS = 30.0
TORCH_DEVICE = (
    "import torch; c = torch.cuda; d = c.get_device_properties(0);"
    "print(d.name, c.mem_get_info(0)[1], d.major, d.minor, sep=chr(9))"
)


def probe_device(ask_torch: Callable[[], str] | None = None) -> Hardware:
    """The first GPU that is visible, or the CPU.

    NVML is asked first; where its Python package is missing, torch.

    Args:
        ask_torch: what TORCH_DEVICE prints; by default a process of its own prints it and leaves no context.
    """
    found = probe_hardware()
    if found.gpus:
        return replace(found, gpus=found.gpus[:1], link=LinkKind.NONE, link_bytes_per_second=0.0)
    told = (ask_torch or _torch_elsewhere)().split("\t")
    if len(told) != 4:
        return found
    name, memory, capability = told[0], int(told[1]), f"{told[2]}.{told[3]}"
    unknown = Gpu(name=name, family="unknown", memory_bytes=memory, flops=0, bandwidth=0, bf16=int(told[2]) >= 8)
    gpu = find_gpu(name, memory) or unknown
    gpu = replace(gpu, name=name, memory_bytes=min(memory, gpu.memory_bytes), compute_capability=capability)
    machine = describe_hardware(gpu, count=1)
    return replace(machine, ram_bytes=found.ram_bytes, cpu_cores=found.cpu_cores, described=False)


def _torch_elsewhere() -> str:
    done = subprocess.run([sys.executable, "-c", TORCH_DEVICE], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def run_case(case: Case, hardware: Hardware, *, steps: int, limit_seconds: float) -> Result:
    """Measure one case in a process of its own; every way to end is a result."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "trial.py"), case.name, str(steps), str(left)]
        code, words = run_limited(command, environ, limit_seconds, Path(folder) / "output.txt")
        if left.is_file():
            return Result(case=case, figures=json.loads(left.read_text(encoding="utf-8")))
    if code is None:
        return Result(case=case, figures={"outcome": "failed", "error": f"over its limit of {limit_seconds:.0f} s"})
    # The kernel ends a process that asks for more memory than the machine has.
    outcome = "oom" if code == -signal.SIGKILL else "failed"
    return Result(case=case, figures={"outcome": outcome, "error": f"ended with {code}: {words}"})


def run_limited(command: list[str], environ: dict[str, str], limit_seconds: float, log: Path) -> tuple[int | None, str]:
    """(exit code, last line of its output); None for a process that was ended at its limit, with all its children."""
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        if code is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return code, (lines[-1] if lines else "no output")[-LAST_WORDS:]


def row_of(result: Result, hardware: Hardware, *, number: int, steps: int) -> dict[str, str]:
    """The table's row: settings as they were applied, figures, predictions."""
    case, facts = result.case, result.case.facts()
    settings = case.candidate(hardware, steps=steps).settings
    gpu = hardware.gpus[0] if hardware.gpus else None
    device = gpu.name if gpu else "CPU"
    values: dict[str, Any] = {
        "id": f"measured-{device.lower().replace(' ', '_')}-{number:03d}",
        "kind": "both",
        "outcome": result.outcome,
        "model": case.row_model,
        "parameters_billion": round(facts.parameters / 1e9, 4),
        "method": case.method,
        "quantization": "nf4-double" if case.method == "qlora" else "none",
        "lora_r": "" if case.method == "full" else settings.lora_r,
        "lora_targets": "" if case.method == "full" else "all-linear",
        "optimizer": "adamw_torch_fused" if gpu else "adamw_torch",
        "param_dtype": DTYPE_NAMES[settings.param_dtype.value],
        "state_notes": WEIGHTS.get((case.method, settings.param_dtype.value), "fp32 adapters under bf16 autocast"),
        "micro_batch": case.micro_batch,
        "seq_len": case.seq_len,
        "seq_kind": "exact",
        "gradient_checkpointing": "yes" if case.checkpointing else "no",
        "attention": settings.attention.value,
        "loss": settings.loss.value,
        "kernels": "HF eager",
        "compile": "no",
        "gpus": 1,
        "strategy": "single",
        "offload": "none",
        "gpu": device,
        "confidence": "full",
        "source": "benchmarks/measure.py",
        "notes": _notes(result, hardware, steps),
        "commit": commit(),
        "date": date.today().isoformat(),
        "versions": versions(),
    }
    values |= _measured(result, hardware, steps) | _predicted(case, hardware, steps)
    return {column: str(values.get(column, "")) for column in COLUMNS}


def _notes(result: Result, hardware: Hardware, steps: int) -> str:
    said = [f"case {result.case.name}", f"random weights, {steps} steps, the first two not timed"]
    if "build_seconds" in result.figures:
        said.append(f"built in {result.figures['build_seconds']:.0f} s")
    if hardware.gpus and hardware.gpus[0].used_bytes > 1.5 * GIB:
        said.append(f"others held {hardware.gpus[0].used_bytes / GIB:.1f} GiB of the GPU before")
    return "; ".join([*said, *([result.figures["error"]] if "error" in result.figures else [])])


def _measured(result: Result, hardware: Hardware, steps: int) -> dict[str, Any]:
    figures = result.figures
    if result.outcome != "ok":
        return {}
    speed = figures["tokens_per_second"]
    if not hardware.gpus:
        grown = round(figures["resident_growth_bytes"] / GIB, 3)
        what = "growth of the process' resident set on a CPU"
        return {"mem_kind": what, "measured_gib_per_gpu": grown, "tokens_per_second": round(speed, 1),
                "tokens_scope": "one CPU process"}  # fmt: skip
    flops = model_flops_per_token(result.case.facts(), result.case.candidate(hardware, steps=steps).settings)
    rate = hardware.gpus[0].flops
    return {
        "mem_kind": "allocated",
        "measured_gib_per_gpu": round(figures["allocated_bytes"] / GIB, 3),
        **{f"{kind}_gib": round(figures[f"{kind}_bytes"] / GIB, 3) for kind in ("allocated", "reserved", "device")},
        "tokens_per_second": round(speed, 1),
        "tokens_scope": "per-GPU",
        "mfu_percent": round(100 * speed * flops / rate, 1) if rate else "",
    }


def _predicted(case: Case, hardware: Hardware, steps: int) -> dict[str, Any]:
    candidate = case.candidate(hardware, steps=steps)
    memory, speed = candidate.memory, candidate.speed
    return {
        **{f"predicted_{kind}_gib": round(value / GIB, 3) for kind, value in _shown(memory, hardware).items()},
        "predicted_tokens_per_second": round(speed.tokens_per_second, 1) if speed else "",
        "predicted_mfu_percent": round(100 * speed.mfu, 1) if speed else "",
        "predicted_fits": "yes" if candidate.fits else "no",
    }


def _shown(memory: Estimate, hardware: Hardware) -> dict[str, float]:
    """What a device of this size would show; on a CPU there are only live tensors."""
    if not hardware.gpus:
        return {"allocated": memory.allocated_bytes}
    capacity = hardware.smallest_gpu_bytes
    return {
        "allocated": memory.allocated_bytes,
        "reserved": memory.shown_reserved_bytes(capacity),
        "device": memory.shown_device_bytes(capacity),
    }


def commit() -> str:
    """The code that measured; empty outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""  # no git on this machine
    return done.stdout.strip()


def versions() -> str:
    """Python and the stack, as `name version` pairs."""
    found = [f"python {platform.python_version()}"]
    for name in STACK:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    hardware = probe_device()
    cases = chosen_cases(on_gpu=bool(hardware.gpus), pattern=options.cases)
    if not cases:
        raise SystemExit(f"measure.py: no case for this device holds {options.cases!r}; --list shows them")
    device = hardware.gpus[0].name if hardware.gpus else "the CPU: tiny cases, memory as growth of the resident set"
    if options.list:
        print(f"{len(cases)} cases on {device}")
        for case in cases:
            found = _predicted(case, hardware, options.steps)
            fits = "fits" if found["predicted_fits"] == "yes" else "does not fit"
            print(f"  {case.name:32} predicted {found['predicted_allocated_gib']:9.3f} GiB allocated, {fits}")
        return 0
    number = rows_in(options.out)
    done = cases_in(options.out) if options.resume else frozenset()
    cases = tuple(case for case in cases if case.name not in done)
    print(f"{len(cases)} cases on {device}", flush=True)
    # Ended from outside, the case in progress is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows: list[dict[str, str]] = []
    started = time.monotonic()
    for case in cases:
        left = options.total - (time.monotonic() - started)
        if left < SHORTEST_CASE_SECONDS:
            break
        result = run_case(case, hardware, steps=options.steps, limit_seconds=min(options.limit, left))
        rows.append(row_of(result, hardware, number=number + len(rows) + 1, steps=options.steps))
        append_row(options.out, rows[-1])
        print(f"{case.name}: {result.outcome} {result.figures.get('error', '')}".rstrip(), flush=True)
    if not_run := cases[len(rows) :]:
        print(f"\nout of time (--total); {len(not_run)} left: {', '.join(case.name for case in not_run)}")
    print(f"\n{short_table(rows)}\n\n{len(rows)} rows appended to {options.out}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure training runs beside their plan.")
    parser.add_argument("--list", action="store_true", help="show the cases with what the plan expects, run none")
    parser.add_argument(
        "--cases",
        "--case",
        metavar="PATTERNS",
        help="only those whose name holds one of these, comma between (* and ?)",
    )
    parser.add_argument("--out", type=Path, default=Path("measured.csv"), metavar="FILE.csv", help="append rows here")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps a case, at least 3 (default: 8)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for each case (default: 300)")
    parser.add_argument("--total", type=float, default=float("inf"), metavar="SECONDS", help="for all cases together")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that --out holds already")
    options = parser.parse_args(arguments)
    if options.steps < 3:
        parser.error("--steps must be 3 or more: the first two are not timed")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
