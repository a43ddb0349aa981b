"""Parameter counts by formula against models that transformers builds on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft_play.errors import ModelError
from sft_play.facts.model import catalog, facts_as_json, facts_from_config, facts_from_json, read_model_facts

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 517,
}
GPT = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 517, "n_positions": 128}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "num_key_value_heads": 2},
    "llama-biased-tied": {
        "model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "llama-head_dim": {"model_type": "llama", **SMALL, "head_dim": 24, "num_key_value_heads": 3},
    "mistral": {"model_type": "mistral", **SMALL, "num_key_value_heads": 2},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 32},
    "gemma": {"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", **SMALL, "num_key_value_heads": 2, "head_dim": 32},
    "gemma3_text": {"model_type": "gemma3_text", **SMALL, "num_key_value_heads": 2, "head_dim": 32},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **SMALL, "num_key_value_heads": 2, "head_dim": 32},
        "vision_config": VISION,
    },
    "phi": {"model_type": "phi", **SMALL},
    "phi3": {"model_type": "phi3", **SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", **GPT},
    "gpt2-inner": {"model_type": "gpt2", **GPT, "n_inner": 100, "tie_word_embeddings": False},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT, "n_inner": 200},
    "gpt_bigcode-multi-head": {"model_type": "gpt_bigcode", **GPT, "multi_query": False},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL},
    "falcon-7b": {"model_type": "falcon", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6},
    "falcon-40b": {
        "model_type": "falcon", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_kv_heads": 2, "new_decoder_architecture": True,
    },
    "falcon-rw": {
        "model_type": "falcon", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "bias": True,
        "multi_query": False, "parallel_attn": False, "alibi": True,
    },
}  # fmt: skip


def build_on_meta(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))


def counted(model: Any) -> int:
    """Parameters with a tied weight counted once."""
    model.tie_weights()
    return sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize("case", CASES)
def test_the_formula_counts_what_transformers_builds(case: str) -> None:
    config = CASES[case]
    facts = facts_from_config(config, name=case)
    model = build_on_meta(config)
    assert facts.parameters == counted(model)
    embeddings = sum(p.numel() for n, p in model.named_parameters() if "norm" in n.lower() or ".ln_" in n)
    if "vision_config" not in config:
        assert facts.norm_parameters == embeddings


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2",
     "gpt_bigcode", "gpt_neox", "falcon"],
)  # fmt: skip
def test_a_config_that_leaves_everything_out_gets_the_familys_defaults(model_type: str) -> None:
    config = {"model_type": model_type}
    if model_type == "phi3":
        config["pad_token_id"] = 0  # type: ignore[assignment]
    assert facts_from_config(config, name=model_type).parameters == counted(build_on_meta(config))


@pytest.mark.parametrize("name", sorted(catalog()))
def test_every_model_of_the_catalog_has_its_stated_size(name: str) -> None:
    assert read_model_facts(name).parameters == catalog()[name]["parameters"]


def test_a_mixture_counts_active_parameters_apart() -> None:
    facts = read_model_facts("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert facts.parameters == 46_702_792_704
    assert 12.8e9 < facts.active_parameters < 13.0e9
    assert facts.expert_parameters == 45_097_156_608


def test_a_folder_is_read_before_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"]))
    assert read_model_facts(str(tmp_path)).hidden_size == 96


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_broken_config_is_a_model_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        read_model_facts(str(tmp_path))


def test_an_unknown_id_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="name a folder"):
        read_model_facts("nobody/nothing")


def test_facts_survive_json() -> None:
    facts = read_model_facts("google/gemma-3-4b-it")
    assert facts_from_json(facts_as_json(facts)) == facts
