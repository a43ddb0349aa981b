"""Batch arithmetic is exact for every combination, and the smallest good micro-batch is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft_play.errors import ConfigError
from sft_play.plan.batch import Batch, allowed_batches, batch_options, choose_batch, default_global_batch


@given(st.integers(1, 512), st.integers(1, 64))
def test_every_option_is_exact(rows: int, ranks: int) -> None:
    total = rows * ranks
    options = batch_options(total, ranks)
    assert options
    assert all(one.global_batch == total for one in options)
    assert [one.micro_batch for one in options] == sorted({one.micro_batch for one in options})


@given(st.integers(1, 64), st.one_of(st.none(), st.integers(1, 64)), st.one_of(st.none(), st.integers(1, 64)))
def test_what_is_fixed_stays_and_the_default_is_rounded_up(ranks: int, micro: int | None, accum: int | None) -> None:
    options = allowed_batches(micro_batch=micro, grad_accum=accum, global_batch=None, data_parallel=ranks)
    for one in options:
        assert micro in {None, one.micro_batch}
        assert accum in {None, one.grad_accum}
        assert one.micro_batch * one.grad_accum * ranks == one.global_batch
    if micro is None or accum is None:
        assert len({one.global_batch for one in options}) == 1


def test_two_gpus_and_nothing_said_make_32() -> None:
    assert default_global_batch(2) == 32
    assert default_global_batch(3) == 33


def test_an_uneven_global_batch_names_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match="30 or 33"):
        batch_options(32, 3)
    with pytest.raises(ConfigError, match="set it to 8"):
        batch_options(4, 8)


def test_contradictions_are_errors() -> None:
    with pytest.raises(ConfigError, match="6 rows x 4 accumulated x 1 data-parallel = 24"):
        allowed_batches(micro_batch=6, grad_accum=4, global_batch=32, data_parallel=1)
    with pytest.raises(ConfigError, match="divisor of 32"):
        allowed_batches(micro_batch=6, grad_accum=None, global_batch=32, data_parallel=1)


SPEEDS = {1: 50.0, 2: 90.0, 4: 98.0, 8: 100.0, 16: 101.0}


@pytest.mark.parametrize(("largest", "taken"), [(16, 4), (8, 4), (2, 2), (1, 1), (0, None)])
def test_the_smallest_within_three_percent_of_the_best_that_fits(largest: int, taken: int | None) -> None:
    options = [Batch(micro_batch=m, grad_accum=16 // m, data_parallel=1) for m in (16, 4, 1, 8, 2)]
    found = choose_batch(options, fits=lambda b: b.micro_batch <= largest, speed=lambda b: SPEEDS[b.micro_batch])
    assert (found.micro_batch if found else None) == taken


def test_without_speeds_the_largest_that_fits() -> None:
    found = choose_batch(batch_options(32, 1), fits=lambda b: b.micro_batch <= 8, speed=lambda b: 0.0)
    assert found == Batch(micro_batch=8, grad_accum=4, data_parallel=1)
