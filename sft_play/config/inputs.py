"""The inputs of the commands: variables of the make command line that are no keys.

Imports nothing beyond the standard library, so that commands can call it before anything is installed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from sft_play.config.nearest import nearest, spoken
from sft_play.errors import SeveralErrors, UnknownKeyError, UsageError

MAKE_VARIABLES = "SFT_PLAY_MAKE_VARIABLES"
"""The Makefile lists here the names that were given on its command line."""

INPUTS_OF: dict[str, tuple[str, ...]] = {
    "config": ("CONFIG", "KEY", "ARGS", "PYTHON"),
    "train": ("CONFIG", "ARGS", "PYTHON"),
    "train-distributed": ("CONFIG", "ARGS", "PYTHON"),
    "train-deepspeed": ("CONFIG", "ARGS", "PYTHON"),
    "train-distributed-tb": ("CONFIG", "ARGS", "PYTHON"),
    "train-deepspeed-tb": ("CONFIG", "ARGS", "PYTHON"),
    "data-check": ("CONFIG", "ARGS", "PYTHON"),
    "verify-resume": ("CONFIG", "ARGS", "PYTHON"),
    "smoke": ("CONFIG", "ARGS", "PYTHON"),
    "download": ("CONFIG", "MODEL", "ARGS", "PYTHON"),
    "plan": ("CONFIG", "HARDWARE", "CALIBRATE", "ARGS", "PYTHON"),
    "eval": ("RUN", "MODEL", "ADAPTER", "DATA", "SPLIT", "TASKS", "ARGS", "PYTHON"),
    "infer": ("RUN", "MODEL", "ADAPTER", "ARGS", "PYTHON"),
    "serve": ("RUN", "MODEL", "ADAPTER", "PORT", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "chat": ("RUN", "URL", "PORT", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "merge": ("RUN", "MODEL", "ADAPTER", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "export": ("RUN", "MODEL", "ADAPTER", "FORMAT", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "push": ("RUN", "REPO", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "report": ("RUN", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "compare": ("RUNS", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "runs": ("RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "clean-runs": ("RUNS", "RUN_OUTPUT_DIR", "ARGS", "PYTHON"),
    "tensorboard": ("RUN_OUTPUT_DIR", "RUN_TENSORBOARD_PORT", "ARGS", "PYTHON"),
    "demo": ("ARGS", "PYTHON"),
    "gpu-info": ("ARGS", "PYTHON"),
    "doctor": ("CONFIG", "ARGS", "PYTHON"),
    "memory-check": ("CONFIG", "ARGS", "PYTHON"),
    "setup-accelerate": ("INTERACTIVE", "ARGS", "PYTHON"),
    "slurm": ("CONFIG", "ARGS", "PYTHON"),
    "install": ("PYTHON", "TORCH_INDEX"),
    "install-unsloth": ("PYTHON", "TORCH_INDEX"),
}
"""What each command reads beside the keys."""

COMMAND_INPUTS = (
    "CONFIG", "ARGS", "KEY", "HARDWARE", "RUN", "RUNS", "MODEL", "ADAPTER", "DATA", "SPLIT", "TASKS",
    "INTERACTIVE", "PYTHON", "TORCH_INDEX", "CALIBRATE", "FORMAT", "REPO", "PORT", "URL",
)  # fmt: skip
"""Inputs of all commands, also of those that come later."""

PASSTHROUGH_PREFIXES = (
    "NCCL_", "CUDA_", "HF_", "OMP_", "TORCH_",
    "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "DS_", "PMI_", "PMIX_", "OMPI_", "SLURM_", "GLOO_", "UCX_", "FI_",
    "NVIDIA_", "MKL_", "PYTHON", "PYTORCH_", "TOKENIZERS_", "TRANSFORMERS_", "BNB_", "TRITON_", "WANDB_", "MLFLOW_",
    "TRACKIO_", "PIP_", "MAKE", "SFT_PLAY_",
)  # fmt: skip
"""Variables of the stack and of launchers, which read them themselves."""

PASSTHROUGH_NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NO_COLOR",
    "COLUMNS", "TERM", "SHELL", "PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


def check_inputs(environ: Mapping[str, str], inputs: Collection[str]) -> None:
    """Refuses, on the make command line of a command without a config, what this command does not read.

    That includes keys: without a config they would do nothing. Commands with a config get the same from `resolve`.

    Args:
        inputs: what the command reads, from `INPUTS_OF`.

    Raises:
        SeveralErrors: one `UnknownKeyError` for each such variable.
    """
    errors = [_refused(one, inputs) for one in given(environ) if one not in inputs and not passes(one)]
    if errors:
        raise SeveralErrors(errors)


def check_endpoint(environ: Mapping[str, str]) -> None:
    """Refuses an HF_ENDPOINT that is no address: the hub's library does not even import with some of them.

    Raises:
        UsageError: it is none.
    """
    endpoint = environ.get("HF_ENDPOINT", "")
    try:
        parts = urlsplit(endpoint)
        known = not endpoint or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
        known = known and endpoint.isprintable() and " " not in endpoint
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{endpoint!r} is no address", where="HF_ENDPOINT", fix="https://host[:port], or unset it")


def given(environ: Mapping[str, str]) -> list[str]:
    """The variables that stand on the make command line."""
    return list(dict.fromkeys(environ.get(MAKE_VARIABLES, "").split()))


def passes(variable: str) -> bool:
    """Whether the stack reads the variable itself (TORCH_INDEX: the installation, before any command)."""
    return variable in PASSTHROUGH_NAMES or variable.startswith(PASSTHROUGH_PREFIXES)


def foreign_input(variable: str, inputs: Collection[str]) -> UnknownKeyError:
    """The error for an input of another command."""
    readers = [command for command, names in INPUTS_OF.items() if variable in names]
    listed = " and ".join([*([", ".join(readers[:-1])] if readers[1:] else []), *readers[-1:]])
    fix = f"make {listed} {'reads' if len(readers) == 1 else 'read'} it; " if readers else ""
    return UnknownKeyError("is no input of this command", where=variable, fix=fix + _reads(inputs))


def _refused(variable: str, inputs: Collection[str]) -> UnknownKeyError:
    if variable in COMMAND_INPUTS:
        return foreign_input(variable, inputs)
    near = spoken(nearest(variable.upper(), inputs))
    what = "is no input of this command" + (f", {near}" if near else "")
    return UnknownKeyError(what, where=variable, fix=_reads(inputs))


def _reads(inputs: Collection[str]) -> str:
    return f"this one reads {', '.join(inputs)}" if inputs else "this one reads none"
