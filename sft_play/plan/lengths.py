"""How long rows are, from the histogram that data preparation kept, and what that does to speed.

Memory is planned at the longest row, for every row of a micro-batch: it has to hold when the longest meet, so the
histogram plays no part in it. Speed is planned at the length that random micro-batches are padded to, and counts a
row's own tokens, not its padding.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sft_play.facts.data import SplitFacts
from sft_play.facts.hardware import Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.settings import Settings
from sft_play.plan.speed import Speed, estimate_speed

# Optimizer steps that `train.group_by_length` sorts together: more saves more padding and shuffles less.
SORTED_STEPS = 50


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


def sorted_steps(rows: int, step_rows: int) -> int:
    """Optimizer steps whose rows `train.group_by_length` sorts at a time: at least a quarter of an epoch is apart."""
    return max(1, min(SORTED_STEPS, rows // (4 * step_rows)))


def expected_longest_by_length(split: SplitFacts, micro_batch: int, step_rows: int) -> float:
    """Expected tokens that a micro-batch is padded to where rows are sorted over several steps.

    The rows of a window are cut into micro-batches by their length, so each ends at a quantile of the lengths: the
    mean of those quantiles, rows lying evenly within a bar of the histogram, and all of it brought to the known mean.
    """
    cuts = max(1, sorted_steps(split.rows_kept, step_rows) * step_rows // micro_batch)
    total, below, shortest, expected, middle = max(1, split.rows_kept), 0, 0, 0.0, 0.0
    for bar, count in split.histogram:
        length = min(bar, split.longest)
        start, end = below / total * cuts, (below + count) / total * cuts
        first, last = math.floor(start + 1e-9), math.floor(end + 1e-9)
        places = (last - first) * ((first + 1 + last) / 2 - start)
        expected += (last - first) * shortest + places / max(end - start, 1e-9) * (length - shortest)
        middle += count * (shortest + length) / 2 / total
        below, shortest = below + count, length
    return max(expected / cuts / max(middle, 1e-9), 1.0) * mean_length(split)


def speed_on_rows(facts: ModelFacts, settings: Settings, hardware: Hardware, split: SplitFacts | None) -> Speed | None:
    """Speed on the rows of a split: time of padded micro-batches, tokens of the rows themselves.

    A pack's micro-batch is taken to be as long as a full one.

    Args:
        split: None where the rows are unknown; every row is then `settings.seq_len` long.
    """
    if split is None:
        return estimate_speed(facts, settings, hardware)
    if settings.packed:
        expected: float = settings.seq_len
    elif settings.by_length:
        expected = expected_longest_by_length(split, settings.micro_batch, settings.global_batch)
    else:
        expected = expected_longest(split, settings.micro_batch)
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
