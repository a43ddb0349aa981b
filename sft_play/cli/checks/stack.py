"""torch, its kernels and its collectives, tried for real in child processes: this one stays free of torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.cli.checks.finding import Finding, Scope, fail, ok, warning
from sft_play.facts.hardware import Hardware, LinkKind
from sft_play.launch.processes import descendants, send
from sft_play.launch.tied import tied

CHILD = "sft_play.runtime.doctor"
# Of the time that a group of ranks may take, what starting them takes at most.
START_SECONDS = 20.0
CPU_RANKS = 2
# Share of the card's rate below which it is not what it should be: throttled, shared, or in a slow slot.
SLOW_KERNELS, SLOW_LINKS = 0.3, 1 / 3
OTHER_TORCH = "make install TORCH_INDEX=... takes a build for this driver"
REPAIR = "make install brings back the pinned packages; if it stays, report this line"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a child process said.

    Attributes:
        told: its last line of JSON; None where it gave none, and then `problem` says why.
    """

    told: dict[str, Any] | None = None
    problem: str = ""


def check_stack(scope: Scope) -> Iterator[Finding]:
    """torch's build, bf16 and 4-bit kernels on each device, and an all-reduce over the ranks."""
    environ = child_environment(scope)
    answer = ask((sys.executable, "-m", CHILD, "kernels"), environ, scope.seconds)
    if answer.told is None:
        yield fail("torch", answer.problem, REPAIR)
        return
    yield from judge_kernels(answer.told, scope.hardware)
    world = ranks_of(answer.told, scope)
    backend = backend_of(answer.told, scope)
    seconds = max(5.0, scope.seconds - START_SECONDS)
    yield judge_all_reduce(ask(all_reduce_command(world, backend, seconds), environ, scope.seconds), backend, scope)


def ranks_of(told: Mapping[str, Any], scope: Scope) -> int:
    """One rank a GPU that torch sees, else the CPU processes that the config asks for or two."""
    asked = scope.hardware.cpu_processes if scope.hardware else 1
    return int(told["gpus"]) or max(CPU_RANKS, asked)


def backend_of(told: Mapping[str, Any], scope: Scope) -> str:
    """What a run would take: `dist.sync_backend`, or NCCL on GPUs and gloo elsewhere."""
    asked = scope.config.dist.sync_backend
    return asked if asked != "auto" and told["gpus"] else "nccl" if told["gpus"] else "gloo"


def all_reduce_command(world: int, backend: str, seconds: float) -> tuple[str, ...]:
    """The launcher that trainings over several ranks have too."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", CHILD)
    return (sys.executable, *launcher, "all-reduce", f"--backend={backend}", f"--seconds={seconds}")


def child_environment(scope: Scope) -> dict[str, str]:
    """The GPUs that a run would take, one thread each, and nothing fetched."""
    environ = {**scope.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.setdefault("OMP_NUM_THREADS", "1")
    if scope.hardware and scope.hardware.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in scope.hardware.gpus)
    return environ


def ask(command: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> Answer:
    """Run a child to its end or to the end of its time; nothing below it is left, however it ends."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            tied(signal.SIGKILL, *command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            send([*descendants(child.pid), child.pid], signal.SIGKILL)
            child.wait()
        lines, complaints = (_lines_of(stream.fileno()) for stream in (out, err))
    told = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), None)
    if code == 0 and told is not None:
        return Answer(told=told)
    if code is None:
        return Answer(problem=f"no end after {seconds:.0f} s")
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return Answer(problem=f"{how}: {_reason(complaints)}"[:400])


def _lines_of(descriptor: int) -> list[str]:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        return stream.read().decode(errors="replace").splitlines()


def _reason(complaints: list[str]) -> str:
    """The last line that looks like an exception's own, else the last that says anything."""
    said = [line.partition("]:")[2] or line for line in complaints if line.strip()]
    errors = [line.strip() for line in said if "Error: " in line and "ChildFailedError" not in line]
    return errors[0] if errors else said[-1].strip() if said else "it said nothing"


def judge_kernels(told: Mapping[str, Any], hardware: Hardware | None) -> Iterator[Finding]:
    """What the child tried, in words: torch's build against the GPUs that are there, then each kind of kernel."""
    seen = len(hardware.gpus) if hardware else 0
    built = f"for CUDA {told['cuda']}" if told["cuda"] else f"for ROCm {told['hip']}" if told["hip"] else "for CPUs"
    found = f"{told['torch']}, built {built}"
    if told["gpus"] < seen:
        yield fail("torch", f"{found}, can use {told['gpus']} of the {seen} GPUs that are there", OTHER_TORCH)
    else:
        yield ok("torch", found + (f", NCCL {told['nccl']}" if told["nccl"] else ""))
    yield _judge_bf16(told["devices"], hardware if told["gpus"] == seen else None)
    broken = [one for one in told["devices"] if one["nf4"]["error"]]
    if broken:
        yield fail("4-bit", f"{broken[0]['device']}: {broken[0]['nf4']['error']}", REPAIR)
    else:
        worst = max(one["nf4"]["off"] for one in told["devices"])
        yield ok("4-bit", f"an NF4 layer forward and backward on {_names(told)}, {worst:.1%} off fp32 at most")


def _judge_bf16(devices: list[dict[str, Any]], hardware: Hardware | None) -> Finding:
    for one in devices:
        if one["bf16"]["error"]:
            return fail("bf16", f"{one['device']}: {one['bf16']['error']}", OTHER_TORCH)
    rates = [one["bf16"]["flops"] for one in devices]
    slowest = min(rates) / 1e12
    found = f"{slowest:,.1f} TFLOP/s" if slowest >= 1 else f"{slowest * 1000:,.0f} GFLOP/s on one thread"
    found += " (the slowest of them)" if len(devices) > 1 else f" on {devices[0]['device']}"
    if any(one["bf16"]["emulated"] for one in devices):
        return warning("bf16", f"{found}, emulated", "train with TRAIN_BF16=false TRAIN_FP16=true")
    rated = [gpu.flops for gpu in hardware.gpus] if hardware else []
    shares = [rate / flops for rate, flops in zip(rates, rated, strict=False) if flops]
    if shares and min(shares) < SLOW_KERNELS:
        cure = "make memory-check shows who else works there; nvidia-smi -q -d PERFORMANCE shows throttling"
        return warning("bf16", f"{found}, {min(shares):.0%} of what the card is made for", cure)
    return ok("bf16", found + (f", {min(shares):.0%} of the card's rate" if shares else ""))


def _names(told: Mapping[str, Any]) -> str:
    return f"{told['gpus']} GPUs" if told["gpus"] > 1 else str(told["devices"][0]["device"])


def judge_all_reduce(answer: Answer, backend: str, scope: Scope) -> Finding:
    """The sum and its speed, against what plans count with between GPUs."""
    name, told = "all-reduce", answer.told
    if told is None:
        gloo = "GLOO_SOCKET_IFNAME=lo names a network interface that is there"
        nccl = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 leaves out direct links, DIST_SYNC_BACKEND=gloo all of it"
        return fail(name, f"{backend}: {answer.problem}", nccl if backend == "nccl" else gloo)
    ranks = f"{told['world']} rank{'s' if told['world'] > 1 else ''} under {backend}"
    if not told["right"]:
        return fail(
            name, f"{ranks}: the sum is wrong", "NCCL_P2P_DISABLE=1; then check IOMMU and ACS settings of the host"
        )
    if told["world"] == 1:
        return ok(name, f"{ranks}; one GPU, so no link to measure")
    rate = told["bytes_per_second"]
    found = f"{ranks}, {told['bytes'] / 2**20:.0f} MiB at {rate / 1e9:,.1f} GB/s (bus bandwidth)"
    planned = scope.hardware.link_bytes_per_second if scope.hardware and scope.hardware.link is not LinkKind.NONE else 0
    if backend == "nccl" and planned and rate < SLOW_LINKS * planned:
        cure = "NCCL_DEBUG=INFO shows the path it takes; nvidia-smi topo -m shows the links; make plan CALIBRATE=1"
        return warning(name, f"{found}, plans count with {planned / 1e9:,.0f}", cure)
    return ok(name, found)
