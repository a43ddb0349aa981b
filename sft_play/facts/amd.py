"""`probe_amd`: AMD's cards through AMD's own tools, where there is no NVML to ask.

The JSON is that of `amd-smi` (ROCm 6 prints a list, ROCm 7 an object whose `gpu_data` is that list; each size is a
value beside its unit, where `MB` means MiB) and of `rocm-smi` (one object a card, every value a text). Other versions
may leave fields out, so each one is read as possibly absent.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 10.0
INSTALLED_IN = "/opt/rocm/bin"
_BYTES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
# An APU's own graphics claim a sliver of RAM; a plan that counted one as a GPU would shrink to it.
SMALLEST_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class AmdProcess:
    """A process on a card; `used_bytes` is None where the tool does not tell."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class AmdCard:
    """One card as the tool names it.

    Attributes:
        index: HIP's number of it, which the variables for visible devices take; where the tool does not tell, its own.
        bus: its PCI address, which stands for a UUID; the card's number where the tool gives none.
        graphics: the target that kernels are built for, such as `gfx942`; empty where unknown.
        pcie: such as `PCIe 5.0 x16`; empty where unknown.
    """

    index: int
    name: str
    bus: str
    total_bytes: int
    used_bytes: int
    graphics: str = ""
    pcie: str = ""
    processes: tuple[AmdProcess, ...] = ()

    @property
    def capability(self) -> str:
        """Major and minor of the target, as torch's ROCm build reports them: 9.4 for gfx942, 11.0 for gfx1101."""
        match = re.fullmatch(r"gfx(\d+)([0-9a-f])[0-9a-f]", self.graphics)
        return f"{match[1]}.{int(match[2], 16)}" if match else ""

    @property
    def bf16(self) -> bool:
        """Matrix units that take bf16: CDNA (gfx908, gfx90a, gfx94x, gfx95x) and RDNA3 and later (gfx11, gfx12)."""
        return bool(re.match(r"gfx(908|90a|9[45]|1[12]\d\d)", self.graphics))


@dataclass(frozen=True, kw_only=True)
class AmdAnswer:
    """What the tools said: the cards, the driver's version, and a line for everything that went wrong."""

    cards: tuple[AmdCard, ...] = ()
    driver: str = ""
    notes: tuple[str, ...] = ()


class _NoAnswerError(Exception):
    """One line on why a tool did not help."""


def probe_amd(environment: Mapping[str, str], *, timeout_seconds: float = TIMEOUT_SECONDS) -> AmdAnswer:
    """AMD's cards, asked of `amd-smi` and, where that has no answer, of `rocm-smi`.

    Args:
        environment: its PATH is searched, then ROCm's usual folder; without a tool nothing is run and nothing noted.
        timeout_seconds: for each call; a tool that takes longer is ended.
    """
    notes: list[str] = []
    for name, ask in (("amd-smi", _ask_amd_smi), ("rocm-smi", _ask_rocm_smi)):
        tool = _find(name, environment)
        if tool is None:
            continue
        try:
            found = ask(tool, timeout_seconds)
        except _NoAnswerError as error:
            notes.append(f"{name} {error}: what it knows of AMD GPUs is unknown")
            continue
        return AmdAnswer(
            cards=tuple(card for card in found.cards if card.total_bytes >= SMALLEST_BYTES),
            driver=found.driver,
            notes=(*notes, *found.notes, *_left_out(found.cards)),
        )
    return AmdAnswer(notes=tuple(notes))


def _find(name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environment.get("PATH")) or shutil.which(name, path=INSTALLED_IN)


def _left_out(cards: Sequence[AmdCard]) -> Iterator[str]:
    for card in cards:
        if card.total_bytes < SMALLEST_BYTES:
            own = f"{card.total_bytes / 2**30:.1f} GiB of its own"
            yield f"AMD GPU {card.index} ({card.name}) is left out: it has {own}"


def _run(tool: str, words: Sequence[str], timeout_seconds: float) -> Any:
    """The JSON that a tool prints, warnings before and after it passed over; its exit code says little.

    Raises:
        _NoAnswerError: it cannot be run, does not end in time, or prints no JSON.
    """
    try:
        done = subprocess.run(
            [tool, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _NoAnswerError(f"did not answer in {timeout_seconds:g} s") from None
    except OSError as error:
        raise _NoAnswerError(f"cannot be run ({error.strerror})") from None
    decoder = json.JSONDecoder()
    for match in re.finditer(r"^\s*[\[{]", done.stdout, re.M):
        try:
            return decoder.raw_decode(done.stdout, match.end() - 1)[0]
        except ValueError:
            continue
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1][:120]
    raise _NoAnswerError(f"ended with {done.returncode} and no JSON ({said})")


def _ask_amd_smi(tool: str, timeout_seconds: float) -> AmdAnswer:
    static = _by_number(_run(tool, ["static", "--json"], timeout_seconds))
    if not static:
        raise _NoAnswerError("answers and lists no GPU")
    notes: list[str] = []
    metric = _more(tool, "metric", timeout_seconds, notes, "memory in use")
    processes = _more(tool, "process", timeout_seconds, notes, "processes")
    numbers = _hip_numbers(tool, timeout_seconds)
    cards = []
    for index, told in sorted(static.items()):
        used = _at(metric.get(index), "mem_usage")
        lanes, generation = _text(_at(told, "bus", "max_pcie_width")), _text(_at(told, "bus", "pcie_interface_version"))
        number = re.search(r"\d+", generation)
        cards.append(
            AmdCard(
                index=numbers.get(index, index),
                name=_text(_at(told, "asic", "market_name")) or "AMD GPU",
                bus=_text(_at(told, "bus", "bdf")) or f"AMD-{index}",
                total_bytes=_size(_at(told, "vram", "size")) or _size(_at(used, "total_vram")) or 0,
                used_bytes=_size(_at(used, "used_vram")) or 0,
                graphics=_text(_at(told, "asic", "target_graphics_version")).lower(),
                pcie=f"PCIe {number[0]}.0 x{lanes}" if number and lanes else "",
                processes=_processes(processes.get(index)),
            )
        )
    drivers = [_at(told, "driver") for _, told in sorted(static.items())]
    versions = [_text(_at(one, "version")) or _text(_at(one, "driver_version")) for one in drivers]
    return AmdAnswer(cards=tuple(cards), driver=next(filter(None, versions), ""), notes=tuple(notes))


def _hip_numbers(tool: str, timeout_seconds: float) -> dict[int, int]:
    """The tool's number to HIP's: they differ where a processor has graphics of its own; older versions do not say."""
    try:
        rows = _by_number(_run(tool, ["list", "-e", "--json"], timeout_seconds))
    except _NoAnswerError:
        return {}
    found = {number: row.get("hip_id") for number, row in rows.items()}
    return {number: hip for number, hip in found.items() if isinstance(hip, int)}


def _more(tool: str, word: str, timeout_seconds: float, notes: list[str], what: str) -> dict[int, Any]:
    """A further answer of `amd-smi`; one that fails leaves its part unknown, and the note says so."""
    try:
        return _by_number(_run(tool, [word, "--json"], timeout_seconds))
    except _NoAnswerError as error:
        notes.append(f"amd-smi {word} {error}: {what} unknown")
        return {}


def _by_number(told: Any) -> dict[int, Any]:
    rows = told.get("gpu_data", told) if isinstance(told, dict) else told
    rows = rows if isinstance(rows, list) else [rows]
    return {row["gpu"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("gpu"), int)}


def _processes(told: Any) -> tuple[AmdProcess, ...]:
    rows = _at(told, "process_list")
    found = []
    for row in rows if isinstance(rows, list) else []:
        one = _at(row, "process_info") or row
        pid = _at(one, "pid")
        if isinstance(pid, int):
            used = _size(_at(one, "memory_usage", "vram_mem")) or _size(_at(one, "mem_usage"))
            name = _text(_at(one, "name")).split(" ")[0].rsplit("/", 1)[-1]
            found.append(AmdProcess(pid=pid, name=name, used_bytes=used))
    return tuple(sorted(found, key=lambda one: -(one.used_bytes or 0)))


def _ask_rocm_smi(tool: str, timeout_seconds: float) -> AmdAnswer:
    words = ["--showproductname", "--showmeminfo", "vram", "--showbus", "--showdriverversion", "--json"]
    told = _run(tool, words, timeout_seconds)
    cards, driver = [], ""
    for key, values in told.items() if isinstance(told, dict) else ():
        if not isinstance(values, dict):
            continue
        low = {str(name).lower(): _text(value) for name, value in values.items()}
        driver = driver or low.get("driver version", "")
        number = re.fullmatch(r"card(\d+)", key)
        if number is None:
            continue
        cards.append(
            AmdCard(
                index=int(number[1]),
                name=low.get("card series") or low.get("device name") or "AMD GPU",
                bus=low.get("pci bus") or f"AMD-{number[1]}",
                total_bytes=_whole(low.get("vram total memory (b)", "")) or 0,
                used_bytes=_whole(low.get("vram total used memory (b)", "")) or 0,
                graphics=low.get("gfx version", "").lower(),
            )
        )
    if not cards:
        raise _NoAnswerError("answers and lists no GPU")
    return AmdAnswer(cards=tuple(sorted(cards, key=lambda card: card.index)), driver=driver)


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    return "" if text.upper() == "N/A" else text


def _size(value: Any) -> int | None:
    """Bytes of `{"value": 196592, "unit": "MB"}`; a bare number is MiB; None for N/A."""
    number, unit = (value.get("value"), value.get("unit")) if isinstance(value, dict) else (value, None)
    whole = _whole(_text(number))
    return None if whole is None else whole * _BYTES.get(str(unit or "MB").upper(), 2**20)


def _whole(text: str) -> int | None:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None
