"""Memory of the phases that only read: evaluation and generation."""

from __future__ import annotations

from sft_play.facts.shapes import ModelFacts
from sft_play.plan import activations as act
from sft_play.plan.settings import Loss, Settings
from sft_play.plan.sharding import divisors
from sft_play.plan.terms import Term, terms


def evaluation_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """A forward pass without gradients: one layer's tensors and the logits, in 16 bits and upcast."""
    tokens = settings.eval_micro_batch * settings.seq_len
    share = tokens / max(1, settings.tokens)
    per_logit = 6 if settings.loss is Loss.FULL else 0
    return terms(
        evaluation_layer=act.live_layer_bytes(facts, settings) / 2 * share,
        evaluation_logits=tokens * facts.vocab_size * per_logit / divisors(settings).logits,
        gathered_weights=act.gathered_bytes(facts, settings),
    )


def generation_terms(facts: ModelFacts, settings: Settings) -> tuple[Term, ...]:
    """Keys and values of every layer for prompt and answer: 2 x layers x kv width x 2 bytes a token and beam."""
    rows = max(1, settings.eval_micro_batch or settings.micro_batch) * settings.num_beams
    tokens = rows * (settings.seq_len + settings.max_new_tokens)
    d = divisors(settings)
    cache = 2 * facts.num_layers * facts.kv_width * 2 * tokens / d.layer / d.depth
    prompt = rows * settings.seq_len * (6 * facts.hidden_size + 2 * facts.intermediate_size) * 2 / d.layer
    return terms(
        key_value_cache=cache,
        prompt_layer=prompt,
        next_token_logits=rows * facts.vocab_size * 6,
        gathered_weights=act.gathered_bytes(facts, settings),
    )
