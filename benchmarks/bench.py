"""Measure this machine: tokens/s, MFU, memory and time to the first step of cases, beside plain trl in the same run.

    make bench                                          all cases of the device, docs/benchmarks.md and its picture
    make bench ARGS="--cases lora,full"
    make bench ARGS="--quick --output FOLDER"           few steps, one round, nothing of the repository touched
    make bench ARGS=--render                            the page again from benchmarks/results

Every case has its row, also where it fails or the plan says that it does not fit; the page is written after each.
On a CPU the cases are small and end in five minutes on two cores: a second round is begun only while there is time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.bench_cases import BenchCase, chosen_cases
from benchmarks.bench_page import MOST_BUSY, merged, ratio, speed_text, write_page
from benchmarks.bench_sides import OURS, PLAIN, UNSLOTH, Bench, summary
from benchmarks.measure import ROOT, commit, probe_device, versions
from sft_play.facts.backends import unsloth_installed
from sft_play.facts.hardware import GIB, Hardware

CPU_STEPS, GPU_STEPS, QUICK_STEPS = 12, 20, 3
CPU_ROUNDS, GPU_ROUNDS = 2, 1
CPU_TOTAL_SECONDS = 270.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the results, the page and the picture; 1 where our side of a case failed."""
    chosen = options(arguments)
    results, page = places(chosen.output)
    if chosen.render:
        write_page(results, page)
        return 0
    hardware = probe_device()
    on_gpu = bool(hardware.gpus)
    try:
        cases = chosen_cases(on_gpu=on_gpu, names=chosen.cases)
    except KeyError as error:
        print(f"error: --cases: no case is called {error} -> ARGS=--list names them", file=sys.stderr)
        return 2
    if chosen.list:
        print("\n".join(f"{case.name:28} {case.why_not(hardware) or 'fits'}" for case in cases))
        return 0
    settle(chosen, on_gpu=on_gpu)
    print(f"{len(cases)} cases on {device_name(hardware)}{'' if on_gpu else ': small ones'}", flush=True)
    busy = busy_share()
    if busy > MOST_BUSY:
        print(f"warning: other work takes {100 * busy:.0f}% of the processors, so the figures will be off", flush=True)
    rows = {case.name: {**empty_row(case, chosen, hardware), "busy": round(busy, 3)} for case in cases}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="sft-play-bench-") as place:
        bench = Bench(folder=Path(place), steps=chosen.steps, limit=chosen.limit)
        for case in measured(bench, cases, rows, chosen, on_gpu=on_gpu):
            write_results(results, hardware, [row for row in rows.values() if row.get("sides") or "skipped" in row])
            write_page(results, page)
            print(said(rows[case.name]), flush=True)
    print(f"written: {page}, {page.with_suffix('.svg')}, {results}")
    return int(any("error" in summary(row["sides"].get(OURS, [])) for row in rows.values() if "sides" in row))


def measured(
    bench: Bench, cases: Sequence[BenchCase], rows: dict[str, dict[str, Any]], chosen: argparse.Namespace, *,
    on_gpu: bool,
) -> Iterator[BenchCase]:  # fmt: skip
    """Each case as its figures of a round are in its row: rounds outermost, the sides in turn."""
    began, took = time.monotonic(), dict.fromkeys(rows, 0.0)
    order = [(number, case) for number in range(chosen.rounds) for case in cases]
    for at, (number, case) in enumerate(order):
        started = time.monotonic()
        if "skipped" in rows[case.name]:
            if number == 0:
                yield case
            continue
        if number and started - began + took[case.name] > chosen.total:
            print(f"{case.name}: no time for round {number + 1} (--total {chosen.total:.0f})")
            continue
        sides = sides_of(case, on_gpu=on_gpu)
        for side in sides[:: -1 if number % 2 else 1]:
            rows[case.name]["sides"].setdefault(side, []).append(bench.measure(case, side, number))
        took[case.name] = time.monotonic() - started
        if case.model_key not in {later.model_key for _, later in order[at + 1 :]}:
            shutil.rmtree(bench.folder / case.model_key, ignore_errors=True)
        yield case


def sides_of(case: BenchCase, *, on_gpu: bool) -> list[str]:
    """Ours first: plain trl follows its plan."""
    unsloth = on_gpu and unsloth_installed() and case.method != "full"
    return [OURS, PLAIN, *([UNSLOTH] if unsloth else [])]


def empty_row(case: BenchCase, chosen: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """What is known of a row before it is measured."""
    published = {**asdict(case.published), "text": case.published.text} if case.published else None
    again = f"--cases {case.name}{' --quick' if chosen.quick else ''}"
    row = {
        **{key: getattr(case, key) for key in ("shape", "method", "seq_len", "micro_batch", "packing")},
        "case": case.name,
        "published": published,
        "steps": chosen.steps,
        "date": date.today().isoformat(),
        "commit": commit(),
        "versions": versions(),
        "threads": int(os.environ.get("OMP_NUM_THREADS") or hardware.cpu_cores),
        "command": f'make bench ARGS="{again}"',
    }
    reason = case.why_not(hardware)
    return {**row, "skipped": reason} if reason else {**row, "sides": {}}


def said(row: dict[str, Any]) -> str:
    """A line about a row as it stands."""
    if "sides" not in row:
        return f"{row['case']}: not run: {row['skipped']}"
    ours, plain = (summary(row["sides"].get(side, [])) for side in (OURS, PLAIN))
    times = ratio(ours, plain)
    told = f", {times:.2f} times plain trl" if times else ""
    return f"{row['case']}: {speed_text(ours)} tokens/s, plain trl {speed_text(plain)}{told}"


def write_results(folder: Path, hardware: Hardware, rows: list[dict[str, Any]]) -> None:
    """Add the rows to today's file of this device."""
    kind = re.sub(r"[^a-z0-9]+", "-", hardware.gpus[0].name.lower()).strip("-") if hardware.gpus else "cpu"
    file = folder / f"bench-{date.today().isoformat()}-{kind}.json"
    folder.mkdir(parents=True, exist_ok=True)
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    device = device_name(hardware)
    kept = old["rows"] if old.get("device") == device else []
    found = {"device": device, "on_gpu": bool(hardware.gpus), "rows": merged(kept, rows)}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def device_name(hardware: Hardware) -> str:
    """The GPU, or the CPU with its cores and memory."""
    if hardware.gpus:
        return f"{hardware.gpus[0].name}, {hardware.gpus[0].memory_bytes / GIB:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    name = names[0] if names else platform.machine()
    return f"CPU: {name}, {hardware.cpu_cores} cores, {hardware.ram_bytes / GIB:.0f} GiB"


def busy_share(seconds: float = 1.0) -> float:
    """The share of all cores' time that other work took just now; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    before = _ticks(stat)
    time.sleep(seconds)
    after = _ticks(stat)
    idle, total = (after[at] - before[at] for at in (0, 1))
    return 1 - idle / total if total else 0.0


def _ticks(stat: Path) -> tuple[int, int]:
    """(idle, all) since the machine started; waiting for a disk is idle, guests are counted as user time."""
    user, nice, system, idle, waiting, *others = map(int, stat.read_text().splitlines()[0].split()[1:9])
    return idle + waiting, user + nice + system + idle + waiting + sum(others)


def places(output: Path | None) -> tuple[Path, Path]:
    """(folder of the results, page)."""
    if output is not None:
        return output, output / "benchmarks.md"
    return ROOT / "benchmarks/results", ROOT / "docs/benchmarks.md"


def settle(chosen: argparse.Namespace, *, on_gpu: bool) -> None:
    """Fill in what depends on the device."""
    chosen.steps = chosen.steps or (QUICK_STEPS if chosen.quick else GPU_STEPS if on_gpu else CPU_STEPS)
    chosen.rounds = chosen.rounds or (1 if chosen.quick else GPU_ROUNDS if on_gpu else CPU_ROUNDS)
    chosen.total = chosen.total or (float("inf") if on_gpu else CPU_TOTAL_SECONDS)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure this machine beside plain trl.")
    parser.add_argument("--cases", default="", metavar="NAME,...", help="these alone")
    parser.add_argument("--list", action="store_true", help="name the cases and whether they fit, run none")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one round")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="results and page there, not in the repository")
    parser.add_argument("--render", action="store_true", help="only write the page from the results there are")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of a run, 2 to 64")
    parser.add_argument("--rounds", type=int, default=0, help="how often each case is measured")
    parser.add_argument("--total", type=float, default=0.0, metavar="SECONDS", help="begin no further round after that")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="for each process")
    if arguments is None:
        arguments = [*sys.argv[1:], *shlex.split(os.environ.get("ARGS", ""))]
    chosen = parser.parse_args(arguments)
    if chosen.steps and not 2 <= chosen.steps <= 64:
        parser.error("--steps: 2 to 64: the first is not timed")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
