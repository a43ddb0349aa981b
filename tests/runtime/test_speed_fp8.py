"""`train.fp8` where torchao is installed, with its products emulated: what is converted, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.runtime.fused import fp8_layers, use_fp8


@pytest.mark.slow
def test_the_decoder_multiplies_in_fp8_and_learns_as_in_bf16(tiny_model: Path) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    losses = []
    for emulated in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        names = list(model.state_dict())
        if emulated:
            assert use_fp8(model, emulate=True) == fp8_layers(model) == 14
            assert type(model.lm_head) is torch.nn.Linear
            assert list(model.state_dict()) == names
        losses.append(curve(model))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)


def curve(model: torch.nn.Module) -> list[float]:
    """Ten steps on the same 21 tokens, no multiple of 16, under bf16 autocast."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    ids = torch.arange(10, 31).reshape(3, 7)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
