"""Packages of kernels for GPUs that are installed here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# By their import.
KERNEL_PACKAGES = ("triton", "liger_kernel", "kernels", "flash_attn", "flash_attn_interface", "torchao")
# Versions of the package `kernels` that transformers 5.23 takes.
KERNELS_FROM, KERNELS_BELOW = (0, 18, 2), (0, 19)


def installed_packages() -> frozenset[str]:
    """Those of KERNEL_PACKAGES that can be imported; `kernels` only in a version that transformers takes."""
    return frozenset(name for name in KERNEL_PACKAGES if find_spec(name) and (name != "kernels" or _kernels_fit()))


def _kernels_fit() -> bool:
    try:
        numbers = tuple(int(part) for part in version("kernels").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return False
    return KERNELS_FROM <= numbers < KERNELS_BELOW
