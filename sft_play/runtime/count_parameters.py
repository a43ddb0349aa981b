"""`python -m sft_play.runtime.count_parameters NAME < config.json`: facts of any architecture, as JSON on stdout.

Builds the model on the meta device, which allocates nothing, and sorts its parameters into the groups of
ModelFacts. Runs as a child process so that planning never loads torch itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sft_play.facts.model import facts_as_json
from sft_play.facts.shapes import Linear, ModelFacts


def count(config: dict[str, Any], *, name: str) -> ModelFacts:
    """Facts of the model that transformers builds for this config.json."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(config["model_type"], **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    model.tie_weights()
    return facts_of_model(model, name=name, model_type=config["model_type"])


def facts_of_model(model: PreTrainedModel, *, name: str, model_type: str) -> ModelFacts:
    """Facts of a model that is already built, on any device."""
    text = model.config.get_text_config()
    sizes = {id(p): p.numel() for p in model.parameters()}
    linears = _linears(model)
    embedding = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    head_size = 0 if head is None else sum(p.numel() for p in head.parameters()) - (head.weight.numel() if tied else 0)
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n.lower() or ".ln_" in n)
    known = embedding + head_size + norms + sum(one.parameters for one in linears)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelFacts(
        name=name,
        model_type=model_type,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        tied=tied,
        max_positions=getattr(text, "max_position_embeddings", None) or 0,
        gated_mlp=any("gate" in one.name for one in linears),
        layer_norm=any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()),
        linears=linears,
        embedding_parameters=embedding,
        head_parameters=head_size,
        norm_parameters=norms,
        other_parameters=sum(sizes.values()) - known,
        experts=_experts(text),
        active_experts=getattr(text, "num_experts_per_tok", None) or 0,
        sliding_window=getattr(text, "sliding_window", None),
    )


def _linears(model: PreTrainedModel) -> tuple[Linear, ...]:
    """Weight matrices by name and shape, the output head left out; stacked experts as one matrix an expert."""
    text = model.config.get_text_config()
    share = (getattr(text, "num_experts_per_tok", None) or 0) / max(1, _experts(text))
    found: Counter[tuple[str, int, int, bool, bool]] = Counter()
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head:
            continue
        expert = "expert" in path
        last = path.rsplit(".", 1)[-1]
        if isinstance(module, torch.nn.Linear):
            found[last, module.in_features, module.out_features, module.bias is not None, expert] += 1
        elif isinstance(module, Conv1D):
            found[last, module.nx, module.nf, True, expert] += 1
        elif expert:
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3:
                    found[name, weight.shape[2], weight.shape[1], False, True] += weight.shape[0]
    return tuple(
        Linear(
            name=name, in_features=i, out_features=o, bias=bias, expert=expert, count=n,
            active=max(1, round(n * share)) if expert and share else n,
        )
        for (name, i, o, bias, expert), n in found.items()
    )  # fmt: skip


def _experts(text: Any) -> int:
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(text, key, None):
            return int(getattr(text, key))
    return 0


def _intermediate_size(text: Any) -> int:
    for key in ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"):
        value = getattr(text, key, None)
        if isinstance(value, int):
            return value
    return int(4 * text.hidden_size)


if __name__ == "__main__":
    print(facts_as_json(count(json.load(sys.stdin), name=sys.argv[1])))
