"""`train.loss` and `train.label_smoothing`: one curve however the logits are held, and a smoothed loss made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from sft_play.runtime.full_loss import token_figures_of, use_full_loss
from tests.tiny import Workplace

IGNORED = -100


@pytest.mark.parametrize(
    "tuning", [pytest.param({"mode": "full"}, marks=pytest.mark.slow), {"mode": "lora", "lora": {"r": 4, "alpha": 8}}]
)
def test_all_logits_at_once_give_the_curve_of_the_chunks(workplace: Workplace, tuning: dict) -> None:
    workplace.config["tuning"] = tuning
    workplace.write(train={**workplace.config["train"], "max_steps": 20, "grad_accum": 2, "eval_on_start": True})
    for kind in ("full", "chunked"):
        done = workplace.train(RUN_NAME=kind, TRAIN_LOSS=kind)
        assert done.code == 0, done.err + done.out
    full, chunked = workplace.losses("full"), workplace.losses("chunked")
    assert len(full) == 20
    assert full[0] == pytest.approx(chunked[0], abs=1e-6)
    assert full == pytest.approx(chunked, abs=5e-5)
    records = [workplace.record(kind) for kind in ("full", "chunked")]
    for name in ("eval_loss", "eval_loss_before"):
        assert records[0][name] == pytest.approx(records[1][name], abs=5e-5)


def test_smoothing_by_hand() -> None:
    """Three tokens of which one is ignored: (1 - s) of the target's log-probability and s of the mean."""
    logits = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 1.0, 1.0], [9.0, 9.0, 0.0]]], requires_grad=True)
    labels = torch.tensor([[7, 0, IGNORED, 2]])
    found = token_figures_of(logits, labels, 0.3)

    def by_hand(row: list[float], target: int) -> float:
        logs = [x - math.log(sum(map(math.exp, row))) for x in row]
        return 0.7 * logs[target] + 0.3 * sum(logs) / 3

    assert found.log_probs.flatten().tolist() == pytest.approx([by_hand([2, 0, 1], 0), 0.0, by_hand([1, 1, 1], 2)])
    assert found.label_mask.tolist() == [[True, False, True]]
    assert found.is_top1.tolist() == [[True, False, False]]
    assert found.entropy[0, 2] == pytest.approx(math.log(3))
    assert found.entropy[0, 1] == 0
    (-found.log_probs.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[0, 1].abs().sum() == 0
    assert logits.grad[0, 3].abs().sum() == 0
    assert logits.grad[0, 0].abs().sum() > 0


def test_the_figures_are_those_of_the_chunked_head(workplace: Workplace) -> None:
    ids = torch.arange(10, 34).reshape(2, 12)
    labels = ids.clone()
    labels[0, :5] = IGNORED
    found = []
    for full in (False, True):
        model = AutoModelForCausalLM.from_pretrained(workplace.model, dtype=torch.float32)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if full:
            use_full_loss(model, 0.0)
        found.append(model(input_ids=ids, labels=labels, fused_lm_head=True))
    for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
        torch.testing.assert_close(found[1][name], found[0][name], atol=1e-5, rtol=1e-5)


def test_a_model_is_smoothed_while_it_trains_and_plain_while_it_is_evaluated(tiny_model: Path) -> None:
    ids = torch.arange(10, 34).reshape(2, 12)
    labels = torch.where(torch.arange(12) < 5, IGNORED, ids)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    use_full_loss(model, 0.5)
    with torch.no_grad():
        logs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        plain = logs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        wanted = {False: plain, True: 0.5 * plain + 0.5 * logs.mean(-1)}
        for training, each in wanted.items():
            found = model.train(training)(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
            torch.testing.assert_close(found, each.masked_fill(labels[:, 1:] == IGNORED, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_smoothed_run_trains_on_it_and_is_evaluated_without(workplace: Workplace) -> None:
    """The first loss is that of the untrained model, by hand; the held-out one is the plain run's."""
    workplace.write(train={**workplace.config["train"], "max_steps": 1, "eval_on_start": True})
    done = workplace.train(RUN_NAME="smooth", TRAIN_LABEL_SMOOTHING="0.5")
    assert done.code == 0, done.err + done.out
    assert "loss full: label smoothing needs all logits at once" in done.out
    assert workplace.train(RUN_NAME="plain").code == 0
    smooth, plain = workplace.losses("smooth")[0], workplace.losses("plain")[0]
    assert smooth != pytest.approx(plain, abs=1e-4)
    records = [workplace.record(name) for name in ("smooth", "plain")]
    assert records[0]["eval_loss_before"] == pytest.approx(records[1]["eval_loss_before"], abs=1e-6)


def test_smoothing_and_chunks_exclude_each_other(workplace: Workplace) -> None:
    done = workplace.train(TRAIN_LABEL_SMOOTHING="0.1", TRAIN_LOSS="chunked")
    assert done.code == 2
    (line,) = done.error_lines
    assert "train.loss: chunked does not go with train.label_smoothing: 0.1" in line
