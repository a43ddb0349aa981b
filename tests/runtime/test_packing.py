"""Training on packs: batches, the proof before the first step, and the same losses as without packing."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BambaConfig, Lfm2Config
from trl import SFTConfig, SFTTrainer

from sft_play.errors import ExitCode, PackedDiffersError, exit_code_of
from sft_play.runtime import collate
from sft_play.runtime.collate import REAL_TOKENS, PackCollator
from sft_play.runtime.packing import PackingCallback, packs_to_prove, prove_packs, worse
from sft_play.runtime.rows import silent_row

PACKS = [
    {"input_ids": [5, 6, 7, 8, 9, 4], "labels": [-100, 6, 7, -100, 9, 4], "lengths": [3, 2, 1]},
    {"input_ids": [3, 2, 1], "labels": [-100, 2, 1], "lengths": [3]},
]
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def test_packs_are_rows_of_their_own_whose_filling_is_a_document() -> None:
    batch = PackCollator(None, pad_id=0, flat=False)(PACKS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4], [3, 2, 1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, 4], [-100, 2, 1, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 1, 2]]
    assert batch[REAL_TOKENS] == 9
    assert "attention_mask" not in batch


def test_for_flash_attention_all_documents_lie_in_one_row() -> None:
    batch = PackCollator(None, pad_id=0, flat=True)(PACKS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 3, 2, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 6, 9]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    assert batch[REAL_TOKENS] == 9
    assert "attention_mask" not in batch


def test_rows_without_lengths_go_to_the_plain_collator() -> None:
    plain = PackCollator(lambda rows: {"input_ids": len(rows)}, pad_id=0, flat=False)
    assert plain([{"input_ids": [1]}, {"input_ids": [2]}]) == {"input_ids": 2}


def test_an_empty_batch_of_packs_is_one_silent_document() -> None:
    row = silent_row(Dataset.from_list(PACKS))
    assert row == {"input_ids": [5, 5], "labels": [-100, -100], "lengths": [2]}


def make_packs(count: int = 3) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        lengths = [9 + number, 12, 5, 7]
        ids = torch.randint(3, 290, (sum(lengths),), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": ids, "lengths": lengths})
    return Dataset.from_list(rows)


def make_trainer(model: Any, tokenizer: Any, folder: Path, *, flat: bool = False) -> SFTTrainer:
    """trl's trainer with our collator; the proof needs nothing else of ours."""
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=make_packs(), processing_class=tokenizer)
    trainer.data_collator = PackCollator(trainer.data_collator, pad_id=0, flat=flat)
    return trainer


def plan(attention: str = "sdpa", dtype: str = "fp32") -> Any:
    return types.SimpleNamespace(dtype=dtype, autocast=dtype, attention=attention, device="cpu", micro_batch=2)


@pytest.fixture
def llama(tiny_model: Path, tmp_path: Path) -> SFTTrainer:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="sdpa")
    return make_trainer(model, AutoTokenizer.from_pretrained(tiny_model), tmp_path)


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", "fp32"), ("eager", "fp32"), ("sdpa", "bf16")])
@pytest.mark.parametrize("flat", [False, True])
def test_documents_of_a_pack_come_out_as_alone(
    tiny_model: Path, tmp_path: Path, attention: str, dtype: str, flat: bool
) -> None:
    weights = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention, dtype=weights)
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(tiny_model), tmp_path, flat=flat)
    proof = prove_packs(trainer, packs_to_prove(trainer.train_dataset, 2), plan(attention, dtype))
    assert proof.holds
    assert proof.neighbours == 0
    assert proof.alone < (1e-6 if dtype == "fp32" else 0.05)


def test_the_proof_leaves_the_model_and_the_random_state_as_they_were(llama: SFTTrainer) -> None:
    llama.model.train()
    llama.model.lm_head.eval()
    modes = {name: module.training for name, module in llama.model.named_modules()}
    random, weights = torch.get_rng_state(), copy.deepcopy(llama.model.state_dict())
    prove_packs(llama, packs_to_prove(llama.train_dataset, 2), plan())
    assert {name: module.training for name, module in llama.model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in llama.model.state_dict().items())
    assert not llama.model.base_model._forward_hooks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_positions_that_run_on_are_found(llama: SFTTrainer, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    llama.model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    monkeypatch.setattr(collate, "positions", lambda lengths: list(range(sum(lengths))))
    with pytest.raises(PackedDiffersError) as refused:
        prove_packs(llama, packs_to_prove(llama.train_dataset, 2), plan(dtype=dtype))
    line = refused.value.line()
    assert "hidden states differ by 0." in line
    assert "llama with attention sdpa" in line
    assert line.endswith("-> train without packing: DATA_PACKING=false")
    assert exit_code_of(refused.value) == ExitCode.CONFIG_OR_DATA


def test_a_mask_beside_the_positions_is_found(llama: SFTTrainer) -> None:
    """What transformers does with one: documents see each other, without a word."""
    ours = llama.data_collator
    llama.data_collator = lambda packs: {**(batch := ours(packs)), "attention_mask": torch.ones_like(batch["labels"])}
    with pytest.raises(PackedDiffersError):
        prove_packs(llama, packs_to_prove(llama.train_dataset, 2), plan())


@pytest.mark.parametrize("name", ["states", "convolutions"])
def test_layers_that_never_look_at_positions_are_found(tiny_model: Path, tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    states = BambaConfig(**SMALL, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
    convolutions = Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    model = AutoModelForCausalLM.from_config({"states": states, "convolutions": convolutions}[name])
    trainer = make_trainer(model, AutoTokenizer.from_pretrained(tiny_model), tmp_path)
    with pytest.raises(PackedDiffersError, match=r"bamba|lfm2"):
        prove_packs(trainer, packs_to_prove(trainer.train_dataset, 2), plan())


def test_without_a_pack_of_two_documents_there_is_nothing_to_prove(
    llama: SFTTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    llama.train_dataset = Dataset.from_list(PACKS[1:])
    job = types.SimpleNamespace(plan=plan(), first_rows=lambda rows: rows)
    PackingCallback(llama, job).on_train_begin()  # type: ignore[arg-type]
    assert "no pack holds two documents" in capsys.readouterr().out
    assert packs_to_prove(make_packs(), 1) == [make_packs()[0]]


def test_nan_is_worse_than_any_number() -> None:
    nan = float("nan")
    assert str(worse(nan, 1.0)) == str(worse(1.0, nan)) == "nan"
    assert worse(1.0, 2.0) == worse(2.0, 1.0) == 2.0
