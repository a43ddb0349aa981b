"""Sums over answer tokens by source, and the figures that they give: loss, perplexity, token accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Sums = Mapping[int, Sequence[float]]
"""Source number -> [negative log likelihood, answer tokens, tokens that were likeliest]."""
MOST_PERPLEXITY = 1e12


class Tally:
    """Adds up the rows that one process has seen."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def add(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Rows as float64 [rows, 3] on the host and the source of each."""
        for source in sources.unique().tolist():
            found = rows[sources == source].sum(0)
            self.sums[source] = self.sums.get(source, torch.zeros(3, dtype=torch.float64)) + found

    def table(self, sources: int) -> torch.Tensor:
        """The sums as [sources, 3], to be added up over ranks."""
        none = torch.zeros(3, dtype=torch.float64)
        return torch.stack([self.sums.get(source, none) for source in range(sources)])

    def totals(self) -> dict[int, list[float]]:
        """Source number -> its sums."""
        return {source: sums.tolist() for source, sums in sorted(self.sums.items())}


def token_figures(sums: Sums, names: Sequence[str], prefix: str = "eval") -> dict[str, float]:
    """Loss, perplexity and token accuracy of all rows, and of each source where several have rows."""
    whole = [sum(column) for column in zip(*sums.values(), strict=True)] or [0.0, 0.0, 0.0]
    figures = _figures(whole, prefix, "")
    counted = {source: found for source, found in sums.items() if found[1]}
    if len(counted) > 1:
        for source, found in counted.items():
            figures |= _figures(found, prefix, f"/{name_of(names, source)}")
    return figures


def name_of(names: Sequence[str], source: int) -> str:
    """The name of a source by its number."""
    return names[source] if source < len(names) else str(source)


def _figures(sums: Sequence[float], prefix: str, suffix: str) -> dict[str, float]:
    total, tokens, correct = sums
    loss = total / max(tokens, 1.0)
    return {
        f"{prefix}_loss{suffix}": loss,
        f"{prefix}_perplexity{suffix}": math.exp(loss) if loss < math.log(MOST_PERPLEXITY) else MOST_PERPLEXITY,
        f"{prefix}_token_accuracy{suffix}": correct / max(tokens, 1.0),
    }
