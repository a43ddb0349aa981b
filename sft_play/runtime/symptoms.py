"""What the stack's exceptions mean: the user's error behind each, with the command to try."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

import torch

from sft_play.errors import (
    DiskFullError,
    EnvironmentProblem,
    OutOfMemoryError,
    RankFailedError,
    ResumeRefusedError,
    SftPlayError,
)
from sft_play.plan.build import Plan
from sft_play.record.run_dir import RunDir
from sft_play.runtime.stream import StreamFailed


@dataclass(frozen=True)
class Symptom:
    """A pattern in an exception's words, and what to say instead."""

    pattern: str
    kind: type[SftPlayError]
    what: str
    fix: str


# The first that matches is taken.
SYMPTOMS = (
    Symptom(
        r"(?i)watchdog caught collective|timed? ?out waiting|wait timeout|nccl.*time(d )?out|operation timed out",
        RankFailedError,
        "a collective waited longer than dist.timeout_seconds",
        "the rank that is missing says why in launch/rank-N.log; NCCL_DEBUG=INFO shows where NCCL waits, "
        "NCCL_TIMEOUT=3600 waits longer",
    ),
    Symptom(
        r"(?i)connection (closed|reset) by peer|broken pipe|socket closed|recv.*0 bytes|remote process exited",
        RankFailedError,
        "another rank left in the middle of a collective",
        "its own lines are in launch/rank-N.log; the same command goes on from the last checkpoint",
    ),
    Symptom(
        r"(?i)nccl ?error|nccl failure|ncclsystemerror|ncclinternalerror|unhandled (system|cuda) error",
        RankFailedError,
        "NCCL cannot talk between the GPUs",
        "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 leaves out direct links, DIST_SYNC_BACKEND=gloo leaves out NCCL",
    ),
    Symptom(
        r"(?i)weights.only load failed|unpicklingerror",
        ResumeRefusedError,
        "a file of the checkpoint holds more than plain values, and was not run",
        "delete that checkpoint to go on from an older one, or RUN_RESUME=never starts anew",
    ),
    Symptom(
        r"(?i)process group has not been initialized",
        RankFailedError,
        "there is no process group",
        "start it with make train-distributed, which starts its ranks, and not the worker by hand",
    ),
    Symptom(
        r"(?i)address already in use|eaddrinuse",
        EnvironmentProblem,
        "the port of machine 0 is taken",
        "name a free one with MAIN_PORT, the same on every machine",
    ),
    Symptom(
        r"(?i)no kernel image is available",
        EnvironmentProblem,
        "this torch has no kernels for this GPU",
        "make gpu-info shows both; make install TORCH_INDEX=... takes another build",
    ),
    Symptom(
        r"(?i)device-side assert|cublas_status_execution_failed|illegal memory access",
        RankFailedError,
        "a kernel failed on the GPU",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel",
    ),
)


def as_user_error(error: BaseException, run: RunDir, plan: Plan, rank: int) -> SftPlayError | None:
    """The user's error behind an exception of the stack, where there is one."""
    if isinstance(error, SftPlayError):
        return error
    if isinstance(error, StreamFailed):
        return error.user_error()
    place = f"rank {rank}" if plan.world_size > 1 else "training"
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return OutOfMemoryError(f"out of memory ({error})"[:300], where=place, fix=smaller(plan))
    if is_disk_full(error):
        return DiskFullError("the disk is full", where=str(run.path))
    words = f"{type(error).__name__}: {error}"
    for symptom in SYMPTOMS:
        if re.search(symptom.pattern, words):
            return symptom.kind(f"{symptom.what} ({words[:160]})", where=place, fix=symptom.fix)
    return None


def smaller(plan: Plan) -> str:
    """The command that halves the micro-batch and keeps the global batch; empty where it is one row already."""
    if plan.micro_batch < 2:
        return ""
    half, rest = plan.micro_batch // 2, plan.micro_batch % 2
    accumulate = f" TRAIN_GRAD_ACCUM={plan.grad_accum * 2}" if not rest else ""
    kept = " and keeps the global batch" if not rest else ""
    return f"TRAIN_BATCH_SIZE={half}{accumulate} needs less{kept}"


def is_disk_full(error: BaseException) -> bool:
    """Python says it by number; torch's and safetensors' writers only in words."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    text = str(error)
    return "inline_container.cc" in text or "iostream error" in text or any(f"os error {n})" in text for n in numbers)
