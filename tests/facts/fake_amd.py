"""Executables that print what AMD's tools print: no machine of the project's has such a card.

The texts have the form of published outputs: `amd-smi static|metric|process --json` of ROCm 7 (an object with
`gpu_data`) and ROCm 6 (a list), and `rocm-smi --json`; only the fields that are read, and neighbours of each kind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def size(value: int | str) -> dict[str, Any]:
    return {"value": value, "unit": "MB"}


def static(
    index: int, *, name: str = "AMD Instinct MI300X", target: str = "gfx942", mib: int = 196592
) -> dict[str, Any]:
    return {
        "gpu": index,
        "asic": {"market_name": name, "vendor_id": "0x1002", "oam_id": "N/A", "target_graphics_version": target},
        "bus": {
            "bdf": f"0000:{5 + index:02x}:00.0",
            "max_pcie_width": 16,
            "max_pcie_speed": {"value": 32, "unit": "GT/s"},
            "pcie_interface_version": "Gen 5",
        },
        "driver": {"name": "amdgpu", "version": "6.12.12"},
        "vram": {"type": "HBM3", "vendor": "N/A", "size": size(mib)},
    }


def metric(index: int, used: int = 284) -> dict[str, Any]:
    return {
        "gpu": index,
        "usage": {"gfx_activity": {"value": 0, "unit": "%"}, "mm_activity": "N/A"},
        "mem_usage": {"total_vram": size(196592), "used_vram": size(used), "free_vram": size(196592 - used)},
    }


def process(index: int, *pids: int) -> dict[str, Any]:
    one = [
        {
            "process_info": {
                "name": "/opt/bin/python3",
                "pid": pid,
                "memory_usage": {"vram_mem": {"value": 2**30, "unit": "B"}},
            }
        }
        for pid in pids
    ]
    return {"gpu": index, "process_list": one or [{"process_info": "No running processes detected"}]}


TWO_MI300X = {
    "static": {"gpu_data": [static(0), static(1)]},
    "metric": {"gpu_data": [metric(0, used=20480), metric(1)]},
    "process": [process(0, 77), process(1)],
}

ROCM_SMI = {
    "card0": {
        "PCI Bus": "0000:05:00.0",
        "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "297500672",
        "Card Series": "AMD Instinct MI300X",
        "Card Model": "0x74a1",
        "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
        "GFX Version": "gfx942",
    },
    "system": {"Driver version": "6.8.5"},
}


def install_tool(folder: Path, name: str, body: str) -> dict[str, str]:
    """An executable called so in a folder of its own; the environment whose PATH is that folder."""
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!{sys.executable}\nimport json, sys, time\n{body}\n", encoding="utf-8")
    tool.chmod(0o755)
    return {"PATH": str(folder)}


def install_amd_smi(folder: Path, answers: dict[str, Any], *, before: str = "") -> dict[str, str]:
    """`amd-smi` that answers by its first word, after the text `before`."""
    return install_tool(
        folder,
        "amd-smi",
        f"assert sys.argv[2:] in (['--json'], ['-e', '--json']), sys.argv\nprint({before!r})\n"
        f"print(json.dumps(json.loads({json.dumps(answers)!r})[sys.argv[1]], indent=4))",
    )
