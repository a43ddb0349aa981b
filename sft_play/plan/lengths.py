"""How long rows are, from the histogram that data preparation kept, and what that does to speed.

Memory is planned at the longest row, for every row of a micro-batch: it has to hold when the longest meet, so the
histogram plays no part in it. Speed is planned at the length that random micro-batches are padded to, and counts a
row's own tokens, not its padding.
"""

from __future__ import annotations

from dataclasses import replace

from sft_play.facts.data import SplitFacts
from sft_play.facts.hardware import Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.settings import Settings
from sft_play.plan.speed import Speed, estimate_speed


def mean_length(split: SplitFacts) -> float:
    """Mean tokens of a sequence: of a row, or of a pack."""
    return split.tokens / max(1, split.sequences)


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


def speed_on_rows(facts: ModelFacts, settings: Settings, hardware: Hardware, split: SplitFacts | None) -> Speed | None:
    """Speed on the rows of a split: time of padded micro-batches, tokens of the rows themselves.

    A pack's micro-batch is taken to be as long as a full one.

    Args:
        split: None where the rows are unknown; every row is then `settings.seq_len` long.
    """
    if split is None:
        return estimate_speed(facts, settings, hardware)
    expected = settings.seq_len if settings.packed else expected_longest(split, settings.micro_batch)
    padded = max(1, round(min(expected, settings.seq_len)))
    found = estimate_speed(facts, replace(settings, seq_len=padded), hardware)
    if found is None:
        return None
    share = min(1.0, mean_length(split) / padded)
    return replace(
        found,
        tokens_per_second=share * found.tokens_per_second,
        tokens_per_second_per_gpu=share * found.tokens_per_second_per_gpu,
        mfu=share * found.mfu,
    )
