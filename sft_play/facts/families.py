"""config.json -> ModelFacts for the common architectures, by formula.

Shapes and defaults are those of transformers 5.23 (`models/<type>/modeling_<type>.py` and the config classes);
tests compare every family with the model built on the meta device.
"""

from __future__ import annotations

from typing import Any

from sft_play.facts.shapes import Linear, ModelFacts

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
_GEMMA3 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True,
    "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip

# What a config.json may leave out, by model_type: the defaults of transformers' config classes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {
        **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "mixtral": {
        **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 131072, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen2": {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3": {
        **_LLAMA, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768, "head_dim": 128,
    },
    "gemma": {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "gemma2": {**_GEMMA3, "vocab_size": 256000, "max_position_embeddings": 8192},
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 51200, "max_position_embeddings": 2048, "activation": "gelu_new",
    },
    "phi3": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32064, "max_position_embeddings": 4096,
    },
    "gpt2": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257,
        "tie_word_embeddings": True, "max_position_embeddings": 1024, "activation": "gelu_new",
    },
    "gpt_bigcode": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257,
        "tie_word_embeddings": True, "max_position_embeddings": 1024, "multi_query": True,
    },
    "gpt_neox": {
        "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
        "vocab_size": 50432, "max_position_embeddings": 2048, "attention_bias": True,
    },
    "falcon": {
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
        "tie_word_embeddings": True, "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True,
    },
}  # fmt: skip

_ALIASES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "ffn_hidden_size": "intermediate_size",
    "num_experts": "num_local_experts", "hidden_act": "activation", "activation_function": "activation",
    "hidden_activation": "activation",
}  # fmt: skip
_UNGATED = frozenset({"phi", "gpt2", "gpt_bigcode", "gpt_neox", "falcon"})
_LAYER_NORM = _UNGATED
_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode"})
_SANDWICH_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
_HEAD_NORMS = frozenset({"qwen3", "gemma3", "gemma3_text"})


def facts_of_family(config: dict[str, Any], *, name: str) -> ModelFacts:
    """Facts of a model whose `model_type` is in FAMILIES.

    Raises:
        KeyError, TypeError, ValueError: the config lacks a key or holds a malformed one.
    """
    kind = config["model_type"]
    c = _complete(config)
    hidden, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    positions = c["max_position_embeddings"] * hidden if kind in _LEARNED_POSITIONS else 0
    head_bias = vocab if kind == "phi" else 0
    experts = c.get("num_local_experts", 0) if kind == "mixtral" else 0
    return ModelFacts(
        name=name,
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=c["intermediate_size"],
        num_layers=layers,
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        vocab_size=vocab,
        tied=c["tie_word_embeddings"],
        max_positions=c["max_position_embeddings"],
        gated_mlp=kind not in _UNGATED,
        layer_norm=kind in _LAYER_NORM,
        norms_per_layer=_norms_per_layer(kind, c),
        head_norms=kind in _HEAD_NORMS or bool(c.get("qk_layernorm")),
        fp32_norm_weights=kind.startswith("gemma"),
        composed_activation=c.get("activation", "") == "gelu_new",
        linears=(*_attention(kind, c), *_mlp(kind, c)),
        embedding_parameters=vocab * hidden + positions,
        head_parameters=head_bias if c["tie_word_embeddings"] else vocab * hidden + head_bias,
        norm_parameters=layers * _layer_norm_parameters(kind, c) + _norm(kind) * hidden,
        other_parameters=_vision_parameters(config) if kind == "gemma3" else 0,
        experts=experts,
        active_experts=c.get("num_experts_per_tok", 0) if experts else 0,
        sliding_window=_window(c),
    )


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """One flat mapping in llama's names, with the family's defaults filled in."""
    text = config.get("text_config") or {}
    given = {_ALIASES.get(key, key): value for key, value in {**config, **text}.items() if value is not None}
    c: dict[str, Any] = {"tie_word_embeddings": False, **FAMILIES[config["model_type"]], **given}
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    c.setdefault("head_dim", hidden // heads)
    if config["model_type"] == "falcon":
        c["num_key_value_heads"] = _falcon_kv_heads(c)
    elif config["model_type"] == "gpt_bigcode" and c["multi_query"]:
        c["num_key_value_heads"] = 1
    c.setdefault("num_key_value_heads", heads)
    c.setdefault("intermediate_size", 4 * hidden)
    return c


def _falcon_kv_heads(c: dict[str, Any]) -> int:
    heads: int = c["num_attention_heads"]
    if c.get("new_decoder_architecture"):
        return int(c.get("num_kv_heads", heads))
    return 1 if c["multi_query"] else heads


def _attention(kind: str, c: dict[str, Any]) -> list[Linear]:
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    query, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]

    def one(name: str, width_in: int, width_out: int, bias: bool) -> Linear:
        return Linear(name=name, in_features=width_in, out_features=width_out, count=layers, active=layers, bias=bias)

    if kind in {"gpt2", "gpt_bigcode"}:
        return [one("c_attn", hidden, query + 2 * kv, True), one("c_proj", query, hidden, True)]
    if kind in {"gpt_neox", "falcon"}:
        bias = bool(c.get("attention_bias")) if kind == "gpt_neox" else bool(c.get("bias"))
        return [one("query_key_value", hidden, query + 2 * kv, bias), one("dense", query, hidden, bias)]
    if kind == "phi3":
        return [one("qkv_proj", hidden, query + 2 * kv, False), one("o_proj", query, hidden, False)]
    if kind == "phi":
        qkv_bias = out_bias = True
    elif kind == "qwen2":
        qkv_bias, out_bias = True, False
    else:
        qkv_bias = out_bias = bool(c.get("attention_bias"))
    out = "dense" if kind == "phi" else "o_proj"
    return [
        one("q_proj", hidden, query, qkv_bias),
        one("k_proj", hidden, kv, qkv_bias),
        one("v_proj", hidden, kv, qkv_bias),
        one(out, query, hidden, out_bias),
    ]


def _mlp(kind: str, c: dict[str, Any]) -> list[Linear]:
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    if kind == "mixtral":
        return _experts(c)
    names = {"phi": ("fc1", "fc2"), "gpt2": ("c_fc", "c_proj"), "gpt_bigcode": ("c_fc", "c_proj")}
    if kind in _UNGATED:
        up, down = names.get(kind, ("dense_h_to_4h", "dense_4h_to_h"))
        shapes = [(up, hidden, inner), (down, inner, hidden)]
        bias = bool(c.get("bias")) if kind == "falcon" else True
    elif kind == "phi3":
        shapes, bias = [("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)], False
    else:
        shapes = [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)]
        bias = bool(c.get("mlp_bias"))
    return [
        Linear(name=name, in_features=i, out_features=o, count=layers, active=layers, bias=bias)
        for name, i, o in shapes
    ]


def _experts(c: dict[str, Any]) -> list[Linear]:
    """Mixtral's router and experts; `w1`, `w3` gate and raise, `w2` lowers."""
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    count, active = layers * c["num_local_experts"], layers * c["num_experts_per_tok"]
    router = Linear(name="gate", in_features=hidden, out_features=c["num_local_experts"], count=layers, active=layers)
    return [router] + [
        Linear(name=name, in_features=i, out_features=o, count=count, active=active, expert=True)
        for name, i, o in (("w1", hidden, inner), ("w3", hidden, inner), ("w2", inner, hidden))
    ]


def _norm(kind: str) -> int:
    """Parameters a norm holds for each feature: weight and bias, or weight alone."""
    return 2 if kind in _LAYER_NORM else 1


def _layer_norm_parameters(kind: str, c: dict[str, Any]) -> int:
    hidden: int = c["hidden_size"]
    head_dim: int = c["head_dim"]
    if kind == "phi":
        return 2 * hidden + (4 * head_dim if c.get("qk_layernorm") else 0)
    own = _norm(kind) * hidden * _norms_per_layer(kind, c)
    return own + (2 * head_dim if kind in _HEAD_NORMS else 0)


def _norms_per_layer(kind: str, c: dict[str, Any]) -> int:
    if kind == "falcon":
        return _falcon_norms(c)
    if kind == "phi":
        return 1
    return 4 if kind in _SANDWICH_NORMS else 2


def _falcon_norms(c: dict[str, Any]) -> int:
    """Norms in a falcon layer: one for a parallel layer, two for the new architecture and for a serial one."""
    if c.get("new_decoder_architecture"):
        return 1 if c.get("num_ln_in_parallel_attn") == 1 else 2
    return 1 if c["parallel_attn"] else 2


def _window(c: dict[str, Any]) -> int | None:
    if c["model_type"] in {"qwen2", "qwen3"} and not c.get("use_sliding_window"):
        return None
    window = c.get("sliding_window")
    return int(window) if window else None


def _vision_parameters(config: dict[str, Any]) -> int:
    """SigLIP tower and projector of a multimodal gemma3 (transformers' `SiglipVisionModel` without its head)."""
    vision = config.get("vision_config")
    if not vision:
        return 0
    width, inner = vision.get("hidden_size", 768), vision.get("intermediate_size", 3072)
    layers, patch = vision.get("num_hidden_layers", 12), vision.get("patch_size", 16)
    image, text_width = vision.get("image_size", 224), _complete(config)["hidden_size"]
    embeddings = 3 * patch * patch * width + width + (image // patch) ** 2 * width
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    return int(embeddings + layers * layer + 2 * width + width * text_width + width)
