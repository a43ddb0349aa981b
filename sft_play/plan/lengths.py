"""How long rows are, from the histogram that data preparation kept."""

from __future__ import annotations

from sft_play.facts.data import SplitFacts


def mean_length(split: SplitFacts) -> float:
    """Mean tokens of a row."""
    return split.tokens / max(1, split.rows_kept)


def expected_longest(split: SplitFacts, rows: int) -> float:
    """Expected tokens of the longest of `rows` random rows: what a micro-batch is padded to.

    The longest is at most L with probability F(L)**rows; bars of the histogram stand for their upper end.
    """
    below, total, expected = 0, max(1, split.rows_kept), 0.0
    for length, count in split.histogram:
        share = ((below + count) / total) ** rows - (below / total) ** rows
        expected += share * min(length, split.longest)
        below += count
    return max(expected, mean_length(split))
