"""What one config needs of this machine: its model, GPUs, disk, data and packages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from sft_play.cli.checks.finding import Finding, Scope, existing_part, fail, failed, ok, warning
from sft_play.cli.checks.network import ask_hub, hub_of, offline_by
from sft_play.cli.gpu_info import gib, unsloth_words
from sft_play.config.not_yet import unavailable
from sft_play.config.origin import Resolved
from sft_play.config.schema import Config
from sft_play.errors import SftPlayError
from sft_play.facts.backends import unsloth_installed
from sft_play.facts.locate import check_model_folder, find_model
from sft_play.facts.model import read_model_facts
from sft_play.facts.probe import probe_hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.disk import estimate_run_bytes
from sft_play.plan.fast import PACKAGES as KERNELS
from sft_play.plan.fast import refuse_without_cuda
from sft_play.plan.select import select_gpus

BYTES_A_WEIGHT = 2
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def check_needs(scope: Scope, resolved: Resolved) -> Iterator[Finding]:
    """Everything that a run of the config would stop at, short of reading its data and loading its model."""
    config = scope.config
    for error in unavailable(resolved):
        yield from failed("settings", error)
    yield check_asked_gpus(scope)
    yield from check_model(scope)
    try:
        facts = read_model_facts(config.model.name)
    except SftPlayError as error:
        yield from failed("disk for it", error)
    else:
        yield from check_room(scope, facts)
    yield check_packages(config)
    if config.tuning.backend == "unsloth":
        yield from check_unsloth(scope)
    if config.dist.cpu_offload != "none" or config.dist.nvme_path:
        yield check_offload(config)


def check_asked_gpus(scope: Scope) -> Finding:
    """The GPUs that `dist.gpus` names."""
    asked = scope.config.dist.gpus
    try:
        seen = probe_hardware(environment=scope.environ)
        taken = select_gpus(seen, asked, default_count=None)
    except SftPlayError as error:
        return failed("its GPUs", error)[0]
    said = "dist.gpus names none" if asked is None else f"dist.gpus is {asked}"
    if taken.gpus:
        return ok("its GPUs", f"{said}: {', '.join(f'GPU {gpu.index}' for gpu in taken.gpus)}")
    if asked:
        return warning(
            "its GPUs", f"{said} and no GPU is there: CPU processes will train", "plan for hours, or remove it"
        )
    return ok("its GPUs", f"{said}: the CPU trains")


def check_model(scope: Scope) -> Iterator[Finding]:
    """The model on this disk, whole; or a hub that it can be fetched from."""
    name = scope.config.model.name
    try:
        folder = find_model(name, scope.config.model.revision)
        if folder is not None and (_is_folder(name) or _whole(folder)):
            weights = check_model_folder(folder, name).weight_bytes
            yield ok("model", f"{name}: {gib(weights)} GiB of weights, whole")
            return
    except SftPlayError as error:
        yield from failed("model", error)
        return
    missing = f"{name} is not {'whole ' if folder else ''}on this disk"
    if offline := offline_by(scope.environ):
        yield fail("model", f"{missing} and {offline} is set", "unset it, or give model.name a local folder")
    elif problem := _no_hub(scope):
        cure = "give model.name a local folder, or mend the network"
        yield fail("model", f"{missing} and the hub {problem}", cure)
    else:
        yield ok("model", f"{missing}; the start fetches it")


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _whole(folder: Path) -> bool:
    """Whether the hub's cache has all of it; where it has a part, the start fetches the rest."""
    try:
        check_model_folder(folder, folder.name)
    except SftPlayError:
        return False
    return True


def _no_hub(scope: Scope) -> str:
    answer = ask_hub(hub_of(scope.environ))
    if answer.status and answer.status < 500:
        return ""
    return f"answers {answer.status}" if answer.status else f"cannot be reached ({answer.problem})"


def check_room(scope: Scope, facts: ModelFacts) -> Iterator[Finding]:
    """Free disk against checkpoints, the result, and weights still to be fetched."""
    needed, there = estimate_run_bytes(scope.config, facts), existing_part(scope.output_dir)
    free = shutil.disk_usage(there).free
    found = f"about {gib(needed)} GiB for checkpoints and result, {gib(free)} free"
    if needed > free:
        cure = "RUN_OUTPUT_DIR on another disk, TRAIN_SAVE_TOTAL_LIMIT=1, or free some"
        yield fail("disk for it", found, cure)
    else:
        yield ok("disk for it", found)
    try:
        missing = find_model(scope.config.model.name, scope.config.model.revision) is None
    except SftPlayError:
        return
    if missing:
        home = Path(scope.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        cache = existing_part(Path(scope.environ.get("HF_HUB_CACHE") or home / "hub"))
        weights, free = BYTES_A_WEIGHT * facts.parameters, shutil.disk_usage(cache).free
        found = f"about {gib(weights)} GiB of weights to fetch, {gib(free)} free at {cache}"
        yield ok("hub's cache", found) if weights < free else fail("hub's cache", found, "set HF_HOME to another disk")


def check_packages(config: Config) -> Finding:
    """Packages beyond the pinned ones that a key names."""
    wanted = {
        "model.attention": KERNELS.get(config.model.attention),
        "model.kernels": KERNELS.get(config.model.kernels),
        "train.fp8": KERNELS["fp8"] if config.train.fp8 else None,
        "dist.strategy": "deepspeed" if config.dist.zero_level or config.dist.strategy.startswith("zero") else None,
        **{f"run.report_to {one}": TRACKERS[one] for one in config.run.report_to},
    }
    needed = {key: package for key, package in wanted.items() if package}
    missing = {key: package for key, package in needed.items() if find_spec(package) is None}
    if not missing:
        return ok("its packages", ", ".join(needed.values()) or "none beyond the stack")
    found = ", ".join(f"{key} needs {package}" for key, package in missing.items())
    return fail("its packages", found, f".venv/bin/pip install the missing, or change {', '.join(missing)}")


def check_unsloth(scope: Scope) -> Iterator[Finding]:
    """The environment of `tuning.backend: unsloth`, and a GPU for it."""
    words = unsloth_words()
    yield ok("unsloth", words) if unsloth_installed() else fail("unsloth", words, "make install-unsloth")
    gpus = scope.hardware.gpus if scope.hardware else ()
    try:
        refuse_without_cuda(scope.config, gpus[0] if gpus else None)
    except SftPlayError as error:
        yield from failed("unsloth's GPU", error)


def check_offload(config: Config) -> Finding:
    """What DeepSpeed's offload compiles and reads with."""
    lacking = [] if shutil.which("g++") or shutil.which("c++") else ["a C++ compiler (g++)"]
    if config.dist.nvme_path:
        lacking += [] if find_library("aio") else ["libaio (libaio-dev)"]
        lacking += [] if Path(config.dist.nvme_path).is_dir() else [f"the folder {config.dist.nvme_path}"]
    if lacking:
        return fail("offload", f"it lacks {', '.join(lacking)}", "install or make it, or set dist.cpu_offload: none")
    return ok("offload", "what DeepSpeed compiles and reads with is there")
