"""`train.loss: full`: the loss from the model's own logits, all at once, behind the interface of trl's chunked head.

trl reads per-token figures from `model(..., fused_lm_head=True)`; here they come from whole logits. That is the plain
path which the others are measured against, and the only one that can spread a part of the target (label smoothing).
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits

from sft_play.runtime.collate import IGNORED

MARK = "_has_full_loss"
"""Attribute of a model whose loss is made here."""


def use_full_loss(model: Any, smoothing: float) -> None:
    """Make the model's per-token figures from whole logits; call it after trl has patched the model.

    Args:
        smoothing: share of the target probability that is spread over the vocabulary, in training only: the loss of
            an evaluation stays the plain one, so that it can be compared between runs.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    plain = base.forward

    @functools.wraps(type(base).forward)  # `generate` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **named: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **named, **({} if labels is None else {"labels": labels}))
        named.pop("num_items_in_batch", None)
        found = plain(*args, **{**named, "use_cache": False})
        return token_figures_of(
            found.logits, labels, smoothing if self.training else 0.0, getattr(found, "aux_loss", None)
        )

    base.forward = types.MethodType(forward, base)
    setattr(base, MARK, True)


def token_figures_of(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, aux_loss: torch.Tensor | None = None
) -> FusedCausalLMOutput:
    """Per-token log-probability, entropy and hit of the next token, 0 where the label is ignored.

    With smoothing s a log-probability is (1 - s) of the target's and s of the mean over the vocabulary.

    Args:
        logits: batch x length x vocabulary, in any type; computed on in fp32.
        labels: batch x length, not shifted.
    """
    labels = labels[:, 1:].to(logits.device)
    logits = logits[:, :-1].float()
    mask = labels != IGNORED
    losses = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    ).view(mask.shape)
    with torch.no_grad():
        entropy = entropy_from_logits(logits).masked_fill(~mask, 0)
        hits = (logits.argmax(-1) == labels) & mask
    loss = losses.sum() / mask.sum().clamp(min=1)
    return FusedCausalLMOutput(
        loss=loss, log_probs=-losses, entropy=entropy, is_top1=hits, label_mask=mask, aux_loss=aux_loss
    )
