"""The machine a run is planned for, as a value: described in a few words or made by `facts.probe`.

Rates are the vendors'; what a program reaches of them is `plan.speed`'s business.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sft_play.errors import UsageError

GIB = 1024**3
GPU_CATALOG = Path(__file__).parent / "catalog" / "gpus.json"

# One direction, what a copy reaches: 16 lanes of the generation, less protocol. NVIDIA's bandwidthTest on such hosts.
PCIE_BYTES_PER_SECOND = {3: 12e9, 4: 24e9, 5: 48e9}
DEFAULT_NETWORK_BYTES_PER_SECOND = 1.1e9  # 10 GbE, where nothing better is known


class LinkKind(StrEnum):
    """How the GPUs of one machine reach each other."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice of it.

    Attributes:
        memory_bytes: what a process can allocate on it.
        used_bytes: what other processes hold now; 0 for a described card.
        flops: dense 16-bit tensor rate, FP32 accumulation, FLOP a second; 0 where unknown.
        bandwidth: memory bandwidth, bytes a second; 0 where unknown.
        bf16: whether bf16 runs on its tensor cores.
        uuid: what CUDA_VISIBLE_DEVICES takes for it; of an AMD card its number, for HIP takes nothing else.
        amd: found through AMD's tools.
        packages: `facts.packages` that are installed beside it; None for a described card.
    """

    name: str
    family: str
    memory_bytes: int
    flops: float
    bandwidth: float
    bf16: bool
    compute_capability: str = ""
    nvlink_bytes_per_second: float = 0.0
    pcie_generation: int = 4
    network_bytes_per_second: float = 0.0
    index: int = 0
    uuid: str = ""
    used_bytes: int = 0
    mig: bool = False
    amd: bool = False
    packages: frozenset[str] | None = field(default=None, compare=False)

    @property
    def fp8(self) -> bool:
        """Whether its tensor cores take fp8 (compute capability 8.9 and later; CDNA3)."""
        if self.amd or self.family == "cdna3":
            return self.family == "cdna3"
        return bool(self.compute_capability) and float(self.compute_capability or 0) >= 8.9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """All machines of a run, alike.

    Attributes:
        gpus: the GPUs of one machine.
        nodes: number of such machines.
        cpu_processes: processes of the run on each machine without a GPU.
        link: how those GPUs are linked; NONE for fewer than two.
        link_bytes_per_second: one direction, per GPU.
        network_bytes_per_second: between machines, one direction, per GPU.
        ram_bytes, cpu_cores: of one machine; 0 where unknown.
        described: made from a description, not from this machine.
        notes: what could not be found out, for the user.
    """

    gpus: tuple[Gpu, ...]
    nodes: int = 1
    cpu_processes: int = 1
    link: LinkKind = LinkKind.NONE
    link_bytes_per_second: float = 0.0
    network_bytes_per_second: float = DEFAULT_NETWORK_BYTES_PER_SECOND
    ram_bytes: int = 0
    cpu_cores: int = 0
    described: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Processes over all machines: one a GPU, or those of machines without."""
        return (len(self.gpus) or self.cpu_processes) * self.nodes

    @property
    def smallest_gpu_bytes(self) -> int:
        """Memory of the smallest GPU: what a run that treats all alike has to fit in."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=0)

    @property
    def unequal(self) -> bool:
        return len({(gpu.family, gpu.memory_bytes) for gpu in self.gpus}) > 1


def parse_hardware(text: str) -> Hardware:
    """A machine from its description: `2xH100-80`, `2x8xA100-80` (machines x GPUs), `RTX4090`, `cpu`.

    Raises:
        UsageError: the form is not that, or no known card is called so.
    """
    words = text.strip()
    if words.lower() == "cpu":
        return Hardware(gpus=(), described=True)
    # GeForce cards are called by their four digits too: 2x4090.
    match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(?:(\d+)\s*[xX*]\s*)?([A-Za-z].*|[2-5]0[5-9]0.*)", words)
    if match is None:
        raise UsageError(f"cannot read {text!r} as a machine", where="HARDWARE", fix=_FORMS)
    first, second, card = match.groups()
    nodes, count = (int(first), int(second)) if second else (1, int(first or 1))
    if not 1 <= nodes * count <= 4096 or nodes < 1:
        raise UsageError(f"{text!r} asks for {nodes} machines of {count} GPUs", where="HARDWARE", fix=_FORMS)
    return describe_hardware(known_gpu(f"RTX{card}" if card[0].isdigit() else card), count=count, nodes=nodes)


_FORMS = "write it as 2xH100-80, 2x8xA100-80 (machines x GPUs), 1xRTX4090 or cpu"


def describe_hardware(gpu: Gpu, *, count: int, nodes: int = 1) -> Hardware:
    """`nodes` machines of `count` GPUs of one kind, linked as such machines usually are."""
    link, speed = link_of(gpu, count)
    return Hardware(
        gpus=tuple(replace(gpu, index=index) for index in range(count)),
        nodes=nodes,
        link=link,
        link_bytes_per_second=speed,
        network_bytes_per_second=gpu.network_bytes_per_second or DEFAULT_NETWORK_BYTES_PER_SECOND,
        described=True,
    )


def link_of(gpu: Gpu, count: int) -> tuple[LinkKind, float]:
    """Link kind and bytes a second, one direction, between `count` such cards in one machine."""
    if count < 2:
        return LinkKind.NONE, 0.0
    if gpu.nvlink_bytes_per_second:
        return LinkKind.NVLINK, gpu.nvlink_bytes_per_second
    return LinkKind.PCIE, PCIE_BYTES_PER_SECOND.get(gpu.pcie_generation, PCIE_BYTES_PER_SECOND[4])


def known_gpu(name: str) -> Gpu:
    """A card of the catalog by any usual spelling.

    Raises:
        UsageError: no card is called so; the nearest name is proposed.
    """
    card = find_gpu(name)
    if card is None:
        names = [entry["name"] for entry in _cards()]
        near = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.5)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise UsageError(f"no card called {name!r} in the catalog", where="HARDWARE", fix=f"{known} ({_FORMS})")
    return card


def find_gpu(name: str, memory_bytes: int = 0) -> Gpu | None:
    """The catalog's card for a name as a driver or a person writes it, by the words in it and the memory size.

    Args:
        name: such as `NVIDIA A100-SXM4-80GB`, `rtx 4090`, `H100-80`.
        memory_bytes: what the driver reports, where it does; decides between cards of one name.
    """
    words = _words(name)
    fitting = [card for card in _cards() if set(card["tokens"]) <= words]
    if not fitting:
        return None
    longest = max(len(card["tokens"]) for card in fitting)
    fitting = [card for card in fitting if len(card["tokens"]) == longest]
    size = memory_bytes / GIB or _size_in(words)
    if size:
        fitting.sort(key=lambda card: abs(card["nominal_gb"] - size))
        if not memory_bytes and abs(fitting[0]["nominal_gb"] - size) > 2:
            return None  # a size that this card was never sold with is a mistake, not a hint
    return _gpu(fitting[0]) if size else _gpu(_usual(fitting))


def _usual(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Without a size in the name: 80 GB where the card has it, else the first."""
    return next((card for card in cards if card["nominal_gb"] == 80), cards[0])


def _words(name: str) -> frozenset[str]:
    text = re.sub(r"\(.*?\)", " ", name.lower())
    text = re.sub(r"(rtx|gtx)(?=\d)", r"\1 ", text)
    text = re.sub(r"(\d)(ti|ada)\b", r"\1 \2", text)
    return frozenset(re.split(r"[^a-z0-9]+", text)) - {"", "nvidia", "geforce", "tesla", "amd", "instinct"}


def _size_in(words: frozenset[str]) -> float:
    sizes = [int(m[1]) for word in words if (m := re.fullmatch(r"(\d{1,3})(?:gi?b?)?", word)) and int(m[1]) >= 8]
    return float(max(sizes, default=0))


@functools.cache
def _cards() -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = json.loads(GPU_CATALOG.read_text(encoding="utf-8"))["cards"]
    return cards


def _gpu(card: dict[str, Any]) -> Gpu:
    return Gpu(
        name=card["name"],
        family=card["family"],
        memory_bytes=int(card["usable_gib"] * GIB),
        flops=card["tflops_16bit"] * 1e12,
        bandwidth=card["bandwidth_gb_per_second"] * 1e9,
        bf16=card["bf16"],
        compute_capability=card["compute_capability"],
        nvlink_bytes_per_second=card["nvlink_gb_per_second"] * 1e9,
        pcie_generation=card["pcie_generation"],
        network_bytes_per_second=card["network_gb_per_second"] * 1e9,
    )
