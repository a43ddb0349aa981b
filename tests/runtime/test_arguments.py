"""trl's arguments: what the plan says arrives there, by names that are not about to go."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sft_play.runtime.arguments import CHECKPOINTING, build_arguments
from tests.launch.planned import make_config, make_plan, make_run


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_argument_has_a_deprecated_name(tmp_path: Path, recomputed: bool) -> None:
    plan = make_plan("single", cpu=True, autocast="fp32", gradient_checkpointing=recomputed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = build_arguments(make_config(), plan, make_run(folder=tmp_path), has_validation=True)
    assert getattr(arguments, CHECKPOINTING) is recomputed
    assert arguments.gradient_accumulation_steps == plan.grad_accum
