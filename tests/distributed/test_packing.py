"""Packs over ranks: the curve and the weights of one process, and the proof under every wrapper."""

from __future__ import annotations

import pytest

from tests.distributed.runs import CASES, SINGLE, Outcome, run_case
from tests.tiny import Workplace

# 32 rows make 15 packs: an epoch is a step of eight and one of seven, which the ranks cannot share evenly.
PACKED = {"DATA_PACKING": "true", "TRAIN_MAX_STEPS": "6"}


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_packs_over_ranks_are_the_run_of_one_process(workplace: Workplace, name: str) -> None:
    done = run_case(workplace, "full", SINGLE, "single", **PACKED)
    assert done.code == 0, done.out[-2000:] + done.err
    assert "packed into 15 sequences" in done.out
    single = Outcome(workplace.path / "runs/single")
    done = run_case(workplace, "full", CASES[name], name, **PACKED)
    assert done.code == 0, done.out[-2000:] + done.err
    outcome = Outcome(workplace.path / "runs" / name)
    assert outcome.record["applied"]["wrapper"].startswith(CASES[name].wrapper)
    assert "packing: documents come out as alone" in done.out
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=5e-6)
    assert outcome.series("grad_norm") == pytest.approx(single.series("grad_norm"), abs=5e-5)
    assert outcome.series("num_tokens") == single.series("num_tokens")
    ours, theirs = outcome.weights, single.weights
    assert max((ours[key] - theirs[key]).abs().max().item() for key in theirs) < 1e-5
