"""Short names for the settings that the plan's tests vary."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.settings import Attention, Kernels, Loss, Method, Settings

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def run(method: str = "lora", **changes: Any) -> Settings:
    """Settings of the published 7B runs, with changes."""
    plain: dict[str, Any] = {
        "method": Method(method),
        "micro_batch": 8,
        "seq_len": 4096,
        "lora_targets": QKVO,
        "attention": Attention.FLASH,
        "kernels": Kernels.TRITON,
        "loss": Loss.FULL,
    }
    return Settings(**(plain | changes))


@pytest.fixture(scope="session")
def mistral() -> ModelFacts:
    return read_model_facts("mistralai/Mistral-7B-v0.1")


@pytest.fixture(scope="session")
def llama8b() -> ModelFacts:
    return read_model_facts("meta-llama/Meta-Llama-3-8B")
