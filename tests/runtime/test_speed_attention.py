"""`model.attention: flex_attention` keeps the documents of a pack apart; what a machine cannot run is one line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.runtime.collate import PackCollator
from tests.tiny import Workplace


@pytest.mark.slow
def test_flex_attention_keeps_packed_documents_apart(workplace: Workplace) -> None:
    """Forward only: torch has no backward pass of it for CPUs; training is tested on a GPU."""
    model = AutoModelForCausalLM.from_pretrained(
        workplace.model, dtype=torch.float32, attn_implementation="flex_attention"
    ).eval()
    documents = [list(range(10, 17)), list(range(40, 51)), list(range(20, 25))]
    packs = [
        {"input_ids": documents[0] + documents[1], "labels": documents[0] + documents[1], "lengths": [7, 11]},
        {"input_ids": documents[2], "labels": documents[2], "lengths": [5]},
    ]
    batch = PackCollator(None, pad_id=0, flat=False)(packs)
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        alone = [model(input_ids=torch.tensor([one]), use_cache=False).logits[0] for one in documents]
    for got, wanted in zip((packed[0, :7], packed[0, 7:18], packed[1, :5]), alone, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({"MODEL_ATTENTION": "flex_attention"}, 2, "torch has no backward pass of it for CPUs"),
        ({"MODEL_ATTENTION": "flash_attention_3"}, 2, "flash_attention_3 needs a GPU"),
        ({"MODEL_KERNELS": "liger"}, 4, "liger kernels need a GPU and none is used"),
        ({"MODEL_KERNELS": "hub"}, 4, "hub kernels need a GPU and none is used"),
        ({"TRAIN_LOSS": "fused"}, 4, "the fused loss is made of Triton kernels and needs a GPU"),
        ({"TRAIN_ACTIVATION_OFFLOADING": "true"}, 2, "offloading needs a GPU"),
        (
            {"TRAIN_FP8": "true", "TRAIN_BF16": "true", "TUNING_MODE": "full", "MODEL_DTYPE": "auto"},
            4,
            "CPU has no fp8 units",
        ),
        ({"TRAIN_FP8": "true", "TRAIN_BF16": "true"}, 2, "train.fp8: true does not go with tuning.mode: lora"),
    ],
)
def test_what_this_machine_lacks_is_one_line(
    workplace: Workplace, variables: dict[str, str], code: int, said: str
) -> None:
    if variables.get("TUNING_MODE") == "full":
        workplace.config["tuning"] = {}
        workplace.write()
    done = workplace.train(**variables)
    assert done.code == code, done.err
    (line,) = done.error_lines
    assert said in line
    assert " -> " in line
    assert "Traceback" not in done.err
