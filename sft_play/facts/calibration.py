"""What finished runs measured on this machine, kept beside their predictions for the plans to come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "measured.jsonl"
SMALLEST_COMPARED_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: memory in bytes, speed in tokens a second; a predicted speed of 0 stands for unknown.

    `memory_bytes` is the peak allocated on a GPU; on a CPU what the process grew by from before the model loaded.
    """

    device: str
    model: str
    method: str
    predicted_memory_bytes: float
    memory_bytes: float
    predicted_tokens_per_second: float
    tokens_per_second: float

    def line(self) -> str:
        """Plan and reality in one line."""
        ratio = self.memory_bytes / self.predicted_memory_bytes - 1
        # Below this the libraries' own buffers are most of what is measured, and a percentage says nothing.
        percent = f" ({ratio:+.0%})" if self.predicted_memory_bytes >= SMALLEST_COMPARED_BYTES else ""
        gib = 2**30
        text = (
            f"{self.method} of {self.model} on {self.device}: memory {self.memory_bytes / gib:.2f} GiB measured, "
            f"{self.predicted_memory_bytes / gib:.2f} planned{percent}; {self.tokens_per_second:,.0f} tokens/s"
        )
        if not self.predicted_tokens_per_second:
            return text + ", no figure planned"
        speed = self.tokens_per_second / self.predicted_tokens_per_second - 1
        return text + f", {self.predicted_tokens_per_second:,.0f} planned ({speed:+.0%})"


def append_measured(folder: Path, measured: Measured) -> None:
    """Add one run to the folder's list."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(measured)) + "\n")


def read_measured(folder: Path, device: str) -> list[Measured]:
    """The runs on one kind of device, oldest first; a line that a crash cut off is passed over."""
    if not (folder / NAME).is_file():
        return []
    found = []
    for line in (folder / NAME).read_text(encoding="utf-8").splitlines():
        try:
            one = Measured(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if one.device == device:
            found.append(one)
    return found
