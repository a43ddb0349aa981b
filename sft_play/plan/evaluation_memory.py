"""Memory of the phases that only read: evaluation and generation."""

from __future__ import annotations

from sft_play.facts.shapes import ModelFacts
from sft_play.plan import activations as act
from sft_play.plan.kernels import LOSS_COSTS
from sft_play.plan.settings import Loss, Settings
from sft_play.plan.sharding import divisors
from sft_play.plan.terms import Term, terms

# Bytes a logit of the next token and sequence: 16 bits as the head gives it and its fp32 copy; a search over beams
# holds log-probabilities, scores and their sum in fp32 beside them (transformers `_beam_search`).
NEXT_TOKEN_BYTES = 6
BEAM_BYTES = 12


def evaluation_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """A forward pass without gradients: one layer's tensors, and the logits that the loss holds at a time."""
    tokens = settings.eval_micro_batch * eval_length(settings)
    share = tokens / max(1, settings.tokens)
    return terms(
        evaluation_layer=act.live_layer_bytes(facts, settings) / 2 * share,
        evaluation_logits=_logit_bytes(facts, settings, tokens),
        gathered_weights=act.gathered_bytes(facts, settings),
        autocast_copies=act.autocast_bytes(facts, settings),
    )


def generation_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Keys and values of every layer for prompt and answer, the prompt's pass, and logits of the next token only."""
    rows = max(1, settings.eval_micro_batch or settings.micro_batch)
    d = divisors(settings)
    prompt = rows * eval_length(settings) * (6 * facts.hidden_size + 2 * facts.intermediate_size) * 2 / d.layer
    each = NEXT_TOKEN_BYTES + (BEAM_BYTES if settings.num_beams > 1 else 0)
    return terms(
        key_value_cache=cache_bytes(facts, settings, rows),
        prompt_layer=prompt,
        next_token_logits=rows * settings.num_beams * facts.vocab_size * each,
        gathered_weights=act.gathered_bytes(facts, settings),
        autocast_copies=act.autocast_bytes(facts, settings),
    )


def cache_bytes(facts: ModelFacts, settings: Settings, rows: int) -> float:
    """Keys and values of `rows` finished answers, and one layer's twice: it is copied to grow by a token.

    2 x layers x kv width a token and beam; keys have the residual stream's type (the rotary embedding's product),
    values that of the computation.
    """
    tokens = rows * settings.num_beams * (eval_length(settings) + settings.max_new_tokens)
    layers = facts.num_layers / divisors(settings).depth + 1
    width = act.stream_bytes(facts, settings) + settings.compute_dtype.bytes
    return layers * facts.kv_width * width * tokens / divisors(settings).layer


def eval_length(settings: Settings) -> int:
    """Tokens of the longest row that is evaluated."""
    return settings.eval_seq_len or settings.seq_len


def _logit_bytes(facts: ModelFacts, settings: Settings, tokens: int) -> float:
    """Logits in 16 bits and fp32 where the loss holds them whole; else those of one tile."""
    if settings.loss is Loss.FULL:
        return tokens * facts.vocab_size * 6 / divisors(settings).logits
    cost = LOSS_COSTS[settings.kernels, settings.loss]
    tile = min(tokens, cost.tile_tokens) * min(facts.vocab_size, cost.tile_vocabulary)
    return float(tile * (act.inside_bytes(facts, settings) + cost.tile_forward))
