"""The textbook's numbers as the plan gives them, and docs/memory.md as the code writes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sft_play.facts.hardware import parse_hardware
from sft_play.plan import lessons
from sft_play.plan.lessons import GB, GUIDES, full_tuning, state_bytes, textbook_model
from sft_play.plan.memory import estimate
from sft_play.plan.settings import Dtype, Method, Placement, Settings
from sft_play.plan.speed import estimate_speed
from sft_play.plan.strategy import fits_memory

SEVEN_BILLION = textbook_model(7_000_000_000)


def test_the_page_is_what_the_code_prints() -> None:
    page = lessons.PAGE.read_text(encoding="utf-8")
    assert lessons.with_lessons(page) == page, "run python -m sft_play.plan.lessons --write and review the difference"


@pytest.mark.parametrize(
    ("placement", "gpus", "gigabytes"),
    [("single", 1, 112), ("ddp", 2, 112), ("zero1", 2, 84), ("zero2", 2, 70), ("zero3", 2, 56)],
)
def test_seven_billion_in_fp32(placement: str, gpus: int, gigabytes: float) -> None:
    one = full_tuning(Placement(placement), gpus, mixed=False)
    assert state_bytes(SEVEN_BILLION, one) / GB == pytest.approx(gigabytes)


@pytest.mark.parametrize(("mixed", "zero1", "zero2"), [(True, 4, 8), (False, 2, 4)])
def test_the_factors_of_zero_are_limits(mixed: bool, zero1: float, zero2: float) -> None:
    def factor(placement: Placement, gpus: int) -> float:
        whole = state_bytes(SEVEN_BILLION, full_tuning(Placement.DDP, gpus, mixed=mixed))
        return whole / state_bytes(SEVEN_BILLION, full_tuning(placement, gpus, mixed=mixed))

    assert factor(Placement.ZERO1, 100_000) == pytest.approx(zero1, rel=1e-3)
    assert factor(Placement.ZERO2, 100_000) == pytest.approx(zero2, rel=1e-3)
    assert factor(Placement.ZERO1, 2) < 0.7 * zero1
    assert factor(Placement.ZERO2, 2) < 0.5 * zero2


def test_ddp_is_as_fast_as_fsdp_until_it_does_not_fit() -> None:
    hardware = parse_hardware(lessons.SHARDED)
    fits = []
    for shape in ((32, 1024, 4160), (32, 2048, 8192), (41, 4096, 16384)):
        rates = {}
        for placement in (Placement.DDP, Placement.FSDP):
            one = Settings(
                method=Method.FULL, micro_batch=8, seq_len=2048, param_dtype=Dtype.BF16, fsdp2=True,
                placement=placement, gpus=8,
            )  # fmt: skip
            facts = lessons.decoder(*shape)
            speed = estimate_speed(facts, one, hardware)
            assert speed is not None
            rates[placement] = speed.tokens_per_second
            fits.append(fits_memory(estimate(facts, one), hardware))
        assert rates[Placement.DDP] == pytest.approx(rates[Placement.FSDP], rel=0.1)
    assert fits == [True, True, True, True, False, True]


@pytest.mark.parametrize(
    ("shape", "billion"), [((32, 1024, 4160), 0.611), ((32, 2048, 8192), 2.28), ((41, 4096, 16384), 11.3)]
)
def test_the_decoders_have_the_sizes_they_stand_for(shape: tuple[int, int, int], billion: float) -> None:
    assert lessons.decoder(*shape).parameters / 1e9 == pytest.approx(billion, rel=0.01)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.size)
def test_the_guides_machines_hold_their_models(guide: lessons.Guide) -> None:
    chosen, least = lessons.guide_candidates(guide)
    assert chosen is not None
    assert chosen.fits
    assert least.fits
    assert least.memory.needed_bytes <= chosen.memory.needed_bytes


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="begin"):
        lessons.with_lessons("# a page\n")


def test_the_module_prints_the_part_and_loads_no_torch() -> None:
    code = (
        "import sys; from sft_play.plan.lessons import main; main([]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("### 7B in fp32 with Adam")
    assert "112 GB" in done.stdout
