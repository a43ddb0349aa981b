"""What `make setup-accelerate` wrote, as a layer of the config below every file.

The file is one that accelerate itself reads; each key that a key of the config stands for is taken, every other one has
to hold what happens here anyway, and anything else is an error: a file edited by hand is not half believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode

from sft_play.config.keys import KEYS
from sft_play.config.nearest import nearest, spoken
from sft_play.config.origin import Layer, Origin, OriginKind, Setting
from sft_play.config.sources import read_text
from sft_play.config.values import show
from sft_play.config.yaml_text import Document, compose
from sft_play.errors import ConfigError, SftPlayError, UnknownKeyError

SETUP_FILE = Path(".sft-play/accelerate.yaml")
PRECISION = ("train.bf16", "train.fp16")
TAKEN = (
    "num_processes", "gpu_ids", "mixed_precision", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port",
)  # fmt: skip
FIXED: Mapping[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_GPU", "MULTI_CPU"),
    "use_cpu": (True, False),
    "rdzv_backend": ("static",),
    "same_network": (True,),
    "main_training_function": ("main",),
    "debug": (False,),
    "enable_cpu_affinity": (False,),
    "downcast_bf16": ("no", False),
}
"""Values that change nothing here."""
ELSEWHERE: Mapping[str, str] = {
    "deepspeed_config": "make train-deepspeed, with dist.deepspeed_config for a file of your own",
    "dynamo_config": "set train.torch_compile",
    "fp8_config": "fp8 is not offered",
    "fsdp_config": "set dist.strategy: fsdp",
    "megatron_lm_config": "Megatron-LM is not offered",
    "mpirun_config": "torchrun starts processes without GPUs",
    "parallelism_config": "set dist.strategy: hsdp or tp",
}


def read_setup(path: Path, *, distributed: bool) -> tuple[Layer, list[SftPlayError]]:
    """The layer that `setup-accelerate` wrote, and what is wrong with it; an empty one where there is no such file.

    Args:
        distributed: take GPUs and machines too; without, only the precision, so that a plain `make train` stays on
            the one GPU that it is for.
    """
    if not path.is_file():
        return Layer(settings={}), []
    document = Document(place=lambda line: f"{path}:{line}")
    try:
        root = compose(read_text(path, str(path)), document.place)
    except ConfigError as error:
        return Layer(settings={}), [error]
    if not isinstance(root, MappingNode):
        what = "the file holds no keys"
        return Layer(settings={}), [ConfigError(what, where=str(path), fix="make setup-accelerate writes it anew")]
    reader = _Reader(place=document.place)
    for entry in document.entries(root):
        reader.lines[entry.key] = entry.line
        reader.values[entry.key] = document.value(entry.node)
    reader.read()
    settings = {key: one for key, one in reader.settings.items() if distributed or key in PRECISION}
    return Layer(settings=settings), [*document.errors, *reader.errors]


def without_precision(layer: Layer) -> Layer:
    """The layer where a stronger one decides the precision: bf16 here and fp16 there are no contradiction."""
    return Layer(settings={key: one for key, one in layer.settings.items() if key not in PRECISION}, notes=layer.notes)


@dataclass(kw_only=True)
class _Reader:
    """One file while its values become settings."""

    place: Callable[[int], str]
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    errors: list[SftPlayError] = field(default_factory=list)

    def read(self) -> None:
        for name, value in self.values.items():
            if name in ELSEWHERE:
                if value not in (None, {}):
                    self._error(name, f"{name} cannot be set here", ELSEWHERE[name])
            elif name in FIXED:
                if value not in FIXED[name]:
                    allowed = ", ".join(show(one) for one in FIXED[name])
                    self._error(
                        name, f"{name} takes {allowed} here, not {show(value)}", "strategies are dist.strategy's"
                    )
            elif name not in TAKEN:
                near = spoken(nearest(name, (*TAKEN, *FIXED)))
                what = f"unknown key {name}" + (f", {near}" if near else "")
                fix = "" if near else "make setup-accelerate writes the file anew"
                self.errors.append(UnknownKeyError(what, where=self.place(self.lines[name]), fix=fix))
        machines = self._count("num_machines", 1, smallest=1)
        processes = self._count("num_processes", None, smallest=1)
        self._take_gpus(processes, machines or 1)
        self._take_precision()
        if machines is not None and machines > 1:
            self._take("dist.num_nodes", "num_machines", machines)
            self._take("dist.node_rank", "machine_rank", self._count("machine_rank", 0, smallest=0))
            self._take("dist.main_address", "main_process_ip", self.values.get("main_process_ip"))
            self._take(
                "dist.main_port", "main_process_port", self._count("main_process_port", None, smallest=0) or None
            )

    def _error(self, name: str, what: str, fix: str) -> None:
        self.errors.append(ConfigError(what, where=self.place(self.lines.get(name, 1)), fix=fix))

    def _count(self, name: str, default: int | None, *, smallest: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            self._error(name, f"{name} takes a whole number from {smallest} on, not {show(value)}", "correct it")
            return default
        return value

    def _take(self, key: str, name: str, value: Any) -> None:
        if value is None or name not in self.lines:
            return
        place = self.place(self.lines[name])
        origin = Origin(kind=OriginKind.SETUP, where=f"{place} (setup-accelerate)", value=value)
        self.settings[key] = Setting(key=key, origin=origin, error_place=place)
        assert key in KEYS

    def _take_gpus(self, processes: int | None, machines: int) -> None:
        """Processes of all machines together, or the GPUs' numbers."""
        named = self.values.get("gpu_ids")
        if named not in (None, "all"):
            parts = [part.strip() for part in str(named).split(",")]
            if not all(part.isdigit() for part in parts):
                self._error("gpu_ids", f"gpu_ids takes all, or numbers like 0,1, not {show(named)}", "correct it")
                return
            self._take("dist.gpus", "gpu_ids", [int(part) for part in parts])
            if processes not in (None, len(parts) * machines):
                self._error("num_processes", f"num_processes: {processes} is not one for each of gpu_ids", "correct it")
        elif processes is not None and processes % machines:
            what = f"num_processes: {processes} cannot be shared evenly by {machines} machines"
            self._error("num_processes", what, "it counts the processes of all machines together")
        elif processes is not None:
            self._take("dist.gpus", "num_processes", processes // machines)

    def _take_precision(self) -> None:
        asked = self.values.get("mixed_precision")
        if asked == "fp16":
            self._take("train.fp16", "mixed_precision", True)
        elif asked in ("bf16", "no", False):
            self._take("train.bf16", "mixed_precision", asked == "bf16")
        elif asked is not None:
            self._error("mixed_precision", f"mixed_precision takes bf16, fp16 or no, not {show(asked)}", "correct it")
