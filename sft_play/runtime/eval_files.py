"""What evaluation writes into the run's folder: predictions of every evaluation, and the cache of answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft_play.record.run_dir import write_atomic
from sft_play.runtime.answers import Generation, Prompt
from sft_play.runtime.dist import Ranks, from_main, to_main

# Answers shown as text in TensorBoard.
SHOWN = 5
# Settings that may not change an answer.
WITHOUT_EFFECT = ("synced", "keep_steps", "concat")
PIECE = 1 << 22


def write_predictions(path: Path, scored: Sequence[dict[str, Any]]) -> None:
    """One JSON line for each answer, replacing an earlier file as a whole."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in scored))


def shown_answers(scored: Sequence[dict[str, Any]]) -> str:
    """The first answers as Markdown; texts are indented, so that nothing in them is markup."""
    parts = []
    for one in scored[:SHOWN]:
        texts = (f"{name}:\n\n" + _indented(one[name]) for name in ("prompt", "reference", "prediction"))
        parts.append(f"row {one['row']}, rougeL {one['rougeL']:.3f}\n\n" + "\n\n".join(texts))
    return "\n\n---\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in (text or "(nothing)").splitlines())


@dataclass
class AnswerCache:
    """Scored answers by prompt, reference, settings and weights, in a file that only grows.

    Args:
        path: eval/cache.jsonl of a run; read at the first question.
    """

    path: Path
    settings: str
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: bool = False

    def key(self, prompt: Prompt, weights: str) -> str:
        """The name of an answer, hex."""
        told = json.dumps([prompt.ids, prompt.reference, self.settings, weights])
        return hashlib.sha256(told.encode()).hexdigest()

    def get(self, prompt: Prompt, weights: str) -> dict[str, Any] | None:
        """The scored answer, for this prompt's row and source; None where it was never made."""
        if not self.read:
            self.read = True
            self._load()
        found = self.known.get(self.key(prompt, weights))
        return {**found, "row": prompt.row, "source": prompt.source} if found else None

    def add(self, prompts: Sequence[Prompt], weights: str, scored: Sequence[dict[str, Any]]) -> None:
        """Keep scored answers."""
        new = {self.key(prompt, weights): one for prompt, one in zip(prompts, scored, strict=True)}
        self.known |= new
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            for key, one in new.items():
                stream.write(json.dumps({"key": key, "answer": one}, ensure_ascii=False) + "\n")

    def _load(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self.known[entry["key"]] = entry["answer"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that a killed run left half


def settings_key(generation: Generation, batch: int) -> str:
    """Everything beside prompt and weights that an answer may depend on, as text."""
    kept = {name: value for name, value in asdict(generation).items() if name not in WITHOUT_EFFECT}
    return json.dumps({**kept, "batch": batch}, sort_keys=True)


def weights_digest(model: torch.nn.Module, ranks: Ranks, *, sharded: bool) -> str:
    """A hash of the trained weights, the same on all ranks. Each rank reads what it holds; a collective."""
    mine = hashlib.sha256()
    if sharded or ranks.main:
        for name, weight in sorted(model.named_parameters()):
            if weight.requires_grad:
                mine.update(f"{name} {_checksum(_local(weight))} ".encode())
    found = to_main(ranks, mine.hexdigest())
    whole = hashlib.sha256("".join(found if sharded else found[:1]).encode()).hexdigest()
    digest: str = from_main(ranks, whole)
    return digest


def _local(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, DTensor):
        return weight.to_local()
    return getattr(weight, "ds_tensor", weight)


@torch.no_grad()
def _checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits, one of them by position, worked out where it lies."""
    bits = weight.detach().contiguous().view(torch.uint8).flatten()
    plain = placed = 0
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), device=piece.device) % 65521 + 1
        plain += int(piece.sum())
        placed += int((piece * places).sum())
    return plain, placed
