"""Merged weights against base and adapter apart, and against peft's own merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from sft_play.errors import DiskFullError, ModelError, ResultDiffersError
from sft_play.record.results import refuse_output
from sft_play.runtime import merge as merging
from sft_play.runtime.merge import MergeOrder, merge, refuse_base
from sft_play.runtime.merge_check import BOUNDS, Comparison, compare, judge

ROW = torch.tensor([[5, 40, 77, 120, 9, 200, 31, 8, 64, 3]])
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model once more, its output matrix that of the embedding."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(1)
    settings = LlamaConfig.from_pretrained(tiny_model)
    settings.tie_word_embeddings = True
    LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


def make_adapter(
    base: Path, folder: Path, *, quantized: bool = False, tokens: int | None = None, **options: Any
) -> Path:
    """An adapter whose tensors all differ from their start."""
    torch.manual_seed(2)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if quantized else None
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=four)
    if tokens:
        plain.resize_token_embeddings(tokens)
    model = get_peft_model(plain, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": EVERY, **options}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder, save_embedding_layers="auto" if tokens is None else True)
    return folder


def merged(base: Path, adapter: Path, output: Path, dtype: str | None = None) -> Path:
    order = MergeOrder(
        base=base, adapter=adapter, output=output, dtype=dtype, trust_remote_code=False, stamp={"mode": "lora"}
    )
    merge(order, lambda folder: {}, lambda folder, found: None)
    return output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=ROW, use_cache=False).logits
    return result


def over_base(base: Path, adapter: Path, tokens: int | None = None) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens:
        model.resize_token_embeddings(tokens)
    return PeftModel.from_pretrained(model, adapter)


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
    "head saved": {"modules_to_save": ["lm_head"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "head": {"target_modules": [*EVERY, "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_computes_what_base_and_adapter_do(
    case: str, tied: bool, tiny_model: Path, tied_model: Path, tmp_path: Path
) -> None:
    base = tied_model if tied else tiny_model
    adapter = make_adapter(base, tmp_path / "adapter", **CASES[case])
    output = merged(base, adapter, tmp_path / "merged")
    result = AutoModelForCausalLM.from_pretrained(output)
    trained = over_base(base, adapter)
    apart, together = logits(trained), logits(result)
    assert (together - apart).abs().max() < 1e-5
    with trained.disable_adapter():
        assert (logits(trained) - apart).abs().max() > 1e-2, "the adapter must do something"
    outer = case not in ("lora", "rslora", "dora", "patterns")
    assert result.config.tie_word_embeddings == (tied and not outer)
    if not (tied and outer):  # peft's own merge loses the tie or the change there
        assert (logits(trained.merge_and_unload()) - together).abs().max() < 1e-5


def test_an_adapter_of_a_4_bit_base_goes_into_its_full_weights(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter", quantized=True)
    result = AutoModelForCausalLM.from_pretrained(merged(tiny_model, adapter, tmp_path / "merged"))
    assert {weight.dtype for weight in result.parameters()} == {torch.float32}
    assert (logits(result) - logits(over_base(tiny_model, adapter))).abs().max() < 1e-5


@pytest.mark.slow
def test_where_4_bits_cannot_be_computed_the_merge_goes_on_and_tells(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter", quantized=True)
    comparison = Comparison(
        base=tiny_model, adapter=adapter, rows=ROW.tolist(), dtype="fp32", bound=1e-5, trust_remote_code=False,
        quantization={"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"},
    )  # fmt: skip
    found = compare(comparison, merged(tiny_model, adapter, tmp_path / "merged"))
    assert found["no_4_bits"]
    assert "mean_of_4_bits" not in found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_added_tokens_and_their_embedding_arrive(
    tied: bool, tiny_model: Path, tied_model: Path, tmp_path: Path
) -> None:
    base = tied_model if tied else tiny_model
    tokens = AutoModelForCausalLM.from_pretrained(base).config.vocab_size + 3
    adapter = make_adapter(base, tmp_path / "adapter", tokens=tokens)
    result = AutoModelForCausalLM.from_pretrained(merged(base, adapter, tmp_path / "merged"))
    assert result.config.vocab_size == tokens
    assert result.config.tie_word_embeddings == tied
    assert (logits(result) - logits(over_base(base, adapter, tokens))).abs().max() < 1e-5


def test_a_model_in_shards_becomes_shards(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(base, max_shard_size="40KB")
    assert len(list(base.glob("model-*.safetensors"))) > 2
    monkeypatch.setattr(merging, "SHARD_BYTES", 50_000)
    adapter = make_adapter(base, tmp_path / "adapter")
    output = merged(base, adapter, tmp_path / "merged")
    names = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(names.values())) == sorted(file.name for file in output.glob("*.safetensors"))
    assert len(set(names.values())) > 2
    result = AutoModelForCausalLM.from_pretrained(output)
    assert (logits(result) - logits(over_base(base, adapter))).abs().max() < 1e-5


def test_the_type_that_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    half = merged(tiny_model, adapter, tmp_path / "half", "bf16")
    exact = load_file(merged(tiny_model, adapter, tmp_path / "exact") / "model.safetensors")
    rounded = load_file(half / "model.safetensors")
    assert {name: weight.dtype for name, weight in rounded.items()} == dict.fromkeys(exact, torch.bfloat16)
    for name, weight in rounded.items():
        assert torch.equal(weight, exact[name].to(torch.bfloat16)), name
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


def edited(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def retensored(adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other method": (lambda one: edited(one, peft_type="IA3"), "peft_type IA3"),
    "bias": (lambda one: edited(one, lora_bias=True), "lora_bias"),
    "fan in": (lambda one: edited(one, fan_in_fan_out=True), "fan_in_fan_out"),
    "parameters": (lambda one: edited(one, target_parameters=["experts.down_proj"]), "target_parameters"),
    "pissa": (lambda one: edited(one, init_lora_weights="pissa"), "init_lora_weights: pissa"),
    "later option": (lambda one: edited(one, use_whatever=True), "use_whatever"),
    "rank": (lambda one: edited(one, r=16), "rank 4 in the file, 16"),
    "half a pair": (
        lambda one: retensored(one, lambda t: t.pop(next(name for name in t if "lora_B" in name))), " only",
    ),
    "stranger": (
        lambda one: retensored(one, lambda t: t.update({"base_model.model.model.layers.9.x.weight": torch.ones(2)})),
        "the base has no model.layers.9.x.weight",
    ),
    "not finite": (lambda one: retensored(one, lambda t: next(iter(t.values())).fill_(float("nan"))), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    change, said = REFUSED[case]
    change(adapter)
    with pytest.raises(ModelError, match=said):
        merged(tiny_model, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_a_quantised_base_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelError, match=r"quantised \(bitsandbytes\)"):
        refuse_base(base)


def test_pickled_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        merged(base, make_adapter(tiny_model, tmp_path / "adapter"), tmp_path / "merged")


def test_a_full_disk_is_told_before_anything_is_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    monkeypatch.setattr(merging, "SMALL_FILES_BYTES", 2**60)  # no disk has that much
    with pytest.raises(DiskFullError, match="GiB are needed"):
        merged(tiny_model, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_only_a_merge_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    output = merged(tiny_model, adapter, tmp_path / "merged")
    refuse_output(output, force=False)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    for theirs in ("", "[1]", '{"version": 2, "files": ["thesis.txt"]}', '{"files": {"a": "b"}}'):
        if theirs:  # other programs write files of that name too
            (foreign / "manifest.json").write_text(theirs)
        for force in (False, True):
            with pytest.raises(ModelError, match="no merge has written"):
                refuse_output(foreign, force=force)
    manifest = json.loads((output / "manifest.json").read_text())
    del manifest["merged"]
    (output / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="a result of a training"):
        refuse_output(output, force=False)
    refuse_output(output, force=True)


@pytest.mark.parametrize(
    ("dtype", "largest", "mean", "said"),
    [
        ("fp32", 9e-5, 1e-6, ""),
        ("fp32", 1.1e-4, 1e-6, "the bound is 1e-05"),
        ("bf16", 0.5, 0.2, ""),
        ("bf16", 0.9, 0.6, "in the mean, where the adapter moves them by 1"),
        ("bf16", 1.1, 0.2, "the bound is 0.1"),
        ("bf16", float("nan"), 0.2, "the bound is 0.1"),
    ],
)
def test_what_a_comparison_lets_pass(dtype: str, largest: float, mean: float, said: str) -> None:
    """The largest logit is 10, and the adapter moves logits by 1 in the mean."""
    figures = {
        "dtype": dtype, "bound": BOUNDS[dtype], "largest": largest, "mean": mean, "largest_logit": 10.0,
        "mean_effect_of_adapter": 1.0, "positions": 9,
    }  # fmt: skip
    if not said:
        judge(figures)
        return
    with pytest.raises(ResultDiffersError, match=said):
        judge(figures)
