"""Architectures without a formula are counted by a child process, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import ModelError
from sft_play.facts import model
from sft_play.facts.families import FAMILIES
from sft_play.facts.model import facts_from_config

OLMO = {"model_type": "olmo2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 300}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_another_architecture_is_counted_and_then_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_from_config(OLMO, name="olmo")
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 64
    assert facts.parameters == 2 * 300 * 64 + 2 * layer + 64
    assert facts.other_parameters == 0
    monkeypatch.setattr(model, "_count", lambda *_, **__: pytest.fail("counted twice"))
    assert facts_from_config(OLMO, name="olmo") == facts


def test_an_architecture_transformers_lacks_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="failed"):
        facts_from_config({"model_type": "no_such_thing"}, name="x")


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3", "gpt2"])
def test_counter_and_formula_agree(kind: str) -> None:
    from sft_play.runtime.count_parameters import count

    config = {"model_type": kind}
    assert kind in FAMILIES
    formula, counted = facts_from_config(config, name="x"), count(config, name="x")
    assert formula.parameters == counted.parameters
    assert formula.active_parameters == counted.active_parameters
    router = sum(one.parameters for one in formula.linears if one.name == "gate")
    assert formula.linear_weights - router == counted.linear_weights  # the counter files a router under "other"
