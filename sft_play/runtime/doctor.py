"""`python -m sft_play.runtime.doctor kernels|all-reduce`: what `make doctor` cannot try without torch.

Each prints one line of JSON last on stdout; nothing else that is printed there or on stderr counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# Relative error that bf16 (8 bits) may have over a sum of a few thousand products.
BF16_ERROR = 0.02
CPU_SIZE, GPU_SIZE = 512, 8192
CPU_REDUCED_BYTES, GPU_REDUCED_BYTES = 16 * 2**20, 256 * 2**20


def main(argv: list[str]) -> int:
    """Run one of the two and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "all-reduce"))
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args(argv)
    if options.what == "kernels":
        print(json.dumps(kernels()), flush=True)
    else:
        all_reduce(options.backend, options.seconds)
    return 0


def kernels() -> dict[str, Any]:
    """torch's build, and each device's bf16 product and 4-bit layer; an error is told in words."""
    cuda = torch.cuda.is_available()
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if cuda else []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "gpus": len(devices),
        "devices": [
            {"device": str(one), "bf16": tried(try_bf16, one), "nf4": tried(try_nf4, one)}
            for one in devices or [torch.device("cpu")]
        ],
    }


def tried(attempt: Callable[[torch.device], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What an attempt gives, or its error in one line."""
    try:
        return attempt(device)
    except Exception as error:  # whatever a kernel or a library throws is the finding
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def try_bf16(device: torch.device) -> dict[str, Any]:
    """A matrix product in bf16 against the same in fp32, and its speed."""
    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    wanted = a[:64] @ b
    a, b = a.bfloat16(), b.bfloat16()
    off = relative(a[:64] @ b, wanted)
    a @ b
    repeats = 10
    wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    wait_for(device)
    seconds = (time.perf_counter() - started) / repeats
    if not off < BF16_ERROR:
        raise ArithmeticError(f"the product is {off:.1%} off the one in fp32")
    emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return {"error": None, "flops": 2 * size**3 / seconds, "off": off, "emulated": emulated}


def try_nf4(device: torch.device) -> dict[str, Any]:
    """A bitsandbytes NF4 layer forward and backward, against the weights that its 4 bits stand for."""
    import bitsandbytes

    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(512, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    inputs = torch.randn(64, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    outputs = layer(inputs)
    upstream = torch.randn_like(outputs)
    outputs.backward(upstream)
    assert inputs.grad is not None
    forward = relative(outputs, inputs.detach().float() @ weight.t())
    backward = relative(inputs.grad, upstream.float() @ weight)
    if not max(forward, backward) < BF16_ERROR:
        raise ArithmeticError(f"output {forward:.1%} and gradient {backward:.1%} off what its weights give in fp32")
    return {"error": None, "off": max(forward, backward)}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; NaN stays NaN."""
    return float((found.detach().float() - wanted).norm() / wanted.norm())


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(backend: str, seconds: float) -> None:
    """Sum a buffer over the ranks that torchrun started, check the sum, time it; rank 0 prints.

    The figure is the bus bandwidth of NVIDIA's nccl-tests: 2 (n-1)/n times the bytes over the time, which each
    link carries whatever n is.
    """
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        backend, timeout=timedelta(seconds=seconds), device_id=device if backend == "nccl" else None
    )
    size = GPU_REDUCED_BYTES if backend == "nccl" else CPU_REDUCED_BYTES
    buffer = torch.full((size // 4,), float(rank + 1), device=device)
    torch.distributed.all_reduce(buffer)
    wanted = world * (world + 1) / 2
    right = bool((buffer == wanted).all())
    repeats = 5
    torch.distributed.barrier()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        torch.distributed.all_reduce(buffer)
    wait_for(device)
    taken = (time.perf_counter() - started) / repeats
    if rank == 0:
        rate = 2 * (world - 1) / world * size / taken
        print(json.dumps({"world": world, "right": right, "bytes": size, "bytes_per_second": rate}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
