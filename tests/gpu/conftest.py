"""Tests that need an NVIDIA GPU. Without one each is skipped with the reason, and torch is not even imported.

    python -m pytest -m gpu tests/gpu

Nothing here needs make, a network or an installed package of ours: only Python with the stack on its path.
"""

from __future__ import annotations

import ctypes
import functools
import os

import pytest

from tests.tiny import ROOT, Workplace


@functools.cache
def no_gpu() -> str:
    """Why no GPU can be used here; empty where one can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver on this machine (libcuda.so.1 cannot be loaded)"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    return ""


@pytest.fixture(autouse=True, scope="session")
def _needs_gpu() -> None:
    """Of the session, so that it comes before the tiny model is built."""
    if reason := no_gpu():
        pytest.skip(reason)


def gpu_environ() -> dict[str, str]:
    """For commands that shall see the GPU: where its libraries and our packages lie is passed on."""
    kept = {
        name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "TRITON_CACHE_DIR") if name in os.environ
    }
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


@pytest.fixture
def gpu_workplace(workplace: Workplace) -> Workplace:
    """The tiny run in the types that the product takes by itself on a GPU."""
    workplace.config["model"] = {**workplace.config["model"], "dtype": "auto"}
    workplace.config["train"] = {**workplace.config["train"], "bf16": "auto"}
    workplace.write()
    return workplace


@pytest.fixture
def nvml() -> None:
    """The product finds GPUs through NVML's Python package alone."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed, so the product sees no GPU")
