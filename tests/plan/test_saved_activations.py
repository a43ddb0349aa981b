"""The activations term against what transformers really saves for the backward pass, counted under fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.facts.model import facts_from_config
from sft_play.plan.activations import stored_bytes
from sft_play.plan.settings import Attention, Checkpointing, Kernels, Loss, Method, Settings

WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 1000}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "intermediate_size": 3584, "num_key_value_heads": 4},
    "qwen2": {**WIDE, "intermediate_size": 3584, "num_key_value_heads": 4},
    "qwen3": {**WIDE, "intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128},
    "gemma2": {**WIDE, "intermediate_size": 4096, "num_key_value_heads": 4, "head_dim": 64},
    "gemma3_text": {**WIDE, "intermediate_size": 4096, "num_key_value_heads": 4, "head_dim": 64},
    "phi3": {**WIDE, "intermediate_size": 2816, "pad_token_id": 0},
    "gpt_neox": {**WIDE, "intermediate_size": 4096},
    "phi": {**WIDE, "intermediate_size": 4096},
}
BATCH, LENGTH = 2, 512


def saved_bytes_a_layer(kind: str, *, attention: str, trained: bool) -> float:
    """Bytes a layer, by the difference between four layers and two, so that what is outside the layers cancels."""
    return (_saved_bytes(kind, 4, attention, trained) - _saved_bytes(kind, 2, attention, trained)) / 2


def _saved_bytes(kind: str, layers: int, attention: str, trained: bool) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind], num_hidden_layers=layers, attention_dropout=0.0)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        model.requires_grad_(trained)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        saved: dict[int, Any] = {}

        def note(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                saved[storage._cdata] = storage
            return tensor

        rows = torch.zeros(BATCH, LENGTH, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.base_model(inputs_embeds=rows, use_cache=False)
        return sum(storage.nbytes() for storage in saved.values())


# transformers has no sdpa for gemma2.
CASES = [
    (kind, attention) for kind in MODELS for attention in ("sdpa", "eager") if (kind, attention) != ("gemma2", "sdpa")
]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_stored_activations_of_a_layer(kind: str, attention: str, trained: bool) -> None:
    facts = facts_from_config({"model_type": kind, **MODELS[kind], "num_hidden_layers": 2}, name=kind)
    settings = Settings(
        method=Method.FULL if trained else Method.LORA,
        micro_batch=BATCH,
        seq_len=LENGTH,
        lora_targets=("no such module",),
        checkpointing=Checkpointing.NONE,
        attention=Attention(attention),
        kernels=Kernels.HF,
        loss=Loss.FULL,
    )
    predicted = stored_bytes(facts, settings) / 2
    assert predicted == pytest.approx(saved_bytes_a_layer(kind, attention=attention, trained=trained), rel=0.17)
