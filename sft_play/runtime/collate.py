"""Batches of packs. Documents are told apart by position ids alone: they begin again at 0 with each document.

No attention mask goes with them: beside one, transformers 5.23 lets packed documents attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

IGNORED = -100
REAL_TOKENS = "real_tokens"
"""Key of a batch of packs: its tokens that are no padding."""
LENGTHS = "lengths"
"""Column of packed rows: the tokens of each document in order."""


@dataclass(frozen=True)
class PackCollator:
    """Puts packs together; rows that are not packed (a validation split's) go to the collator of plain rows.

    Args:
        plain: collates rows without lengths.
        pad_id: fills packs up to the longest of the batch. The filling is a document of its own without labels.
        flat: one row of all documents, for kernels that take their lengths (flash attention); else a row a pack.
        unsloth: name the lengths as its layers read them, which look at no positions for that.
    """

    plain: Any
    pad_id: int
    flat: bool
    unsloth: bool = False

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if LENGTHS not in examples[0]:
            return dict(self.plain(examples))
        return self._flattened(examples) if self.flat else self._apart(examples)

    def _apart(self, packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(pack["input_ids"]) for pack in packs)
        filling = [longest - len(pack["input_ids"]) for pack in packs]
        rows = list(zip(packs, filling, strict=True))
        ids = [[*pack["input_ids"], *[self.pad_id] * extra] for pack, extra in rows]
        labels = [[*pack["labels"], *[IGNORED] * extra] for pack, extra in rows]
        places = [positions([*pack[LENGTHS], extra]) for pack, extra in rows]
        return _batch(ids, labels, places, real=sum(len(pack["input_ids"]) for pack in packs))

    def _flattened(self, packs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids, labels, lengths = (
            list(chain.from_iterable(p[key] for p in packs)) for key in ("input_ids", "labels", LENGTHS)
        )
        if self.unsloth:
            told = {"packed_seq_lengths": torch.tensor(lengths, dtype=torch.int32)}
            return {**_batch([ids], [labels], [positions(lengths)], real=len(ids)), **told}
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        # What varlen kernels and short convolutions would else work out in every layer, waiting for the GPU.
        return {
            **_batch([ids], [labels], [positions(lengths)], real=len(ids)),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "seq_idx": numbers[None],
        }


def positions(lengths: Sequence[int]) -> list[int]:
    """0, 1, 2 ... for each document of these lengths."""
    return list(chain.from_iterable(map(range, lengths)))


def _batch(ids: list[list[int]], labels: list[list[int]], places: list[list[int]], *, real: int) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "position_ids": torch.tensor(places),
        REAL_TOKENS: torch.tensor(real),
    }
