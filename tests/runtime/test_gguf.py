"""GGUF files of tiny models of each family: read back, and loaded again through transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sft_play.errors import ModelError, ResultDiffersError
from sft_play.runtime.gguf_file import check_gguf, rope_factors, write_gguf
from sft_play.runtime.gguf_vocabulary import read_vocabulary, without_marks
from tests.data.tokenizers_made import make_tokenizer
from tests.tiny import ROOT

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 128, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}
TEXTS = (
    "What does os.path.join do?\n\n It joins 12345 paths.",
    "<|im_start|>user\nHello, I'm world<|im_end|>\n",
    "äöü 你好",
)


def make(folder: Path, case: str) -> Path:
    family = case.split()[0]
    made = make_tokenizer("chatml", folder)
    tokens = len(AutoTokenizer.from_pretrained(made))
    config = AutoConfig.for_model(family, vocab_size=tokens + 5, **{**SHAPE, **FAMILIES[case]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def again(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    return out[0].tolist()


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_comes_back_as_it_was(case: str, tmp_path: Path) -> None:
    folder, file = make(tmp_path, case), tmp_path / "model.gguf"
    write_gguf(folder, file, "f32", "tiny")
    found = check_gguf(folder, file)
    assert (found["largest"], set(found["types"])) == (0.0, {"f32"})
    ids = torch.tensor([[5, 40, 77, 120, 9, 200, 31, 8]])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if case == "llama linear":  # transformers reads no scaling of positions from a GGUF file
        assert GGUFReader(file).fields["llama.rope.scaling.factor"].contents() == 2.0
        return
    loaded = again(file)
    with torch.no_grad():
        assert (model(ids).logits - loaded(ids).logits).abs().max() < 1e-5
    assert greedy(model, ids) == greedy(loaded, ids)


def test_the_tokenizer_comes_back_as_it_was(tmp_path: Path) -> None:
    folder, file = make(tmp_path, "llama"), tmp_path / "model.gguf"
    write_gguf(folder, file, "f16", "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert loaded(text, add_special_tokens=False).input_ids == tokenizer(text, add_special_tokens=False).input_ids
    chat = [{"role": "user", "content": "Hello"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    fields = GGUFReader(file).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_every_tensor_is_there_in_its_type(kind: str, tmp_path: Path) -> None:
    folder, file = make(tmp_path, "qwen3"), tmp_path / "model.gguf"
    write_gguf(folder, file, kind, "tiny")
    found = check_gguf(folder, file)
    source = load_file(folder / "model.safetensors")
    assert found["tensors"] == len(source) == len(GGUFReader(file).tensors)
    assert set(found["types"]) == {"f32", kind}
    read = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    down = read["blk.1.ffn_down.weight"]
    back = quants.dequantize(down.data, down.tensor_type)
    weight = source["model.layers.1.mlp.down_proj.weight"].numpy()
    if kind == "f16":
        assert np.array_equal(back, weight.astype(np.float16).astype(np.float32))
    else:
        assert 0 < np.abs(back - weight).max() < 0.01


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    folder, file = make(tmp_path, "llama"), tmp_path / "model.gguf"
    write_gguf(folder, file, "q8_0", "tiny")
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(ResultDiffersError, match="is not what was written"):
        check_gguf(folder, file)


def test_positions_of_llama_3_are_divided_as_transformers_does(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = AutoConfig.for_model("llama", vocab_size=64, **{**SHAPE, "rope_parameters": rope, "head_dim": 32})
    model = AutoModelForCausalLM.from_config(config)
    plain = 500000.0 ** -(np.arange(0, 32, 2) / 32)
    factors = rope_factors(config)
    assert factors is not None
    assert np.allclose(plain / factors, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    assert len(set(factors.tolist())) == 3


def edit(folder: Path, change: Any) -> None:
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))


def test_an_unknown_way_of_splitting_is_refused(tmp_path: Path) -> None:
    folder = make_tokenizer("llama3", tmp_path)  # its pattern is like Llama 3's, and is not
    with pytest.raises(ModelError, match=r"split in a way that has no name here.*convert_hf_to_gguf"):
        read_vocabulary(folder, 500)


@pytest.mark.parametrize(("style", "said"), [("metaspace", "sentencepiece"), ("lowercase", "normalizer Sequence")])
def test_other_vocabularies_are_refused(style: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read_vocabulary(make_tokenizer(style, tmp_path), 500)


@pytest.mark.parametrize(
    ("pattern", "whole", "name"),
    [
        (r"\p{N}{1,3}", True, "llama-bpe"),
        (r"\p{N}", False, "qwen2"),
    ],
)
def test_known_ways_of_splitting_have_their_names(pattern: str, whole: bool, name: str, tmp_path: Path) -> None:
    folder = make_tokenizer("chatml", tmp_path)
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": words + pattern + rest}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, level]}
    edit(folder, lambda one: (one.update(pre_tokenizer=steps), one["model"].update(ignore_merges=whole)))
    assert read_vocabulary(folder, 500).pre == name
    edit(folder, lambda one: one["model"].update(ignore_merges=not whole))
    with pytest.raises(ModelError, match="no name here"):
        read_vocabulary(folder, 500)


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tokenizer("chatml", tmp_path)
    AutoConfig.for_model("gpt_neox").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"gpt_neox is not written as GGUF here.*convert_hf_to_gguf"):
        write_gguf(folder, tmp_path / "model.gguf", "f16", "tiny")


def test_marks_of_what_is_learned_become_comments() -> None:
    assert without_marks("{%- generation %}x{% endgeneration -%}") == "{#- generation #}x{# endgeneration -#}"


@pytest.mark.slow
def test_the_demo_model_answers_the_same_from_its_file(tmp_path: Path) -> None:
    base = ROOT / "models/SmolLM2-135M-Instruct"
    if not (base / "model.safetensors").is_file():
        pytest.skip("make demo fetches the model")
    folder = tmp_path / "demo"
    shutil.copytree(base, folder)
    file = tmp_path / "demo.gguf"
    write_gguf(folder, file, "f16", "demo")
    assert check_gguf(folder, file)["tensors"] == len(load_file(folder / "model.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = again(file)
    for question in ("What is the capital of France?", "Add 12 and 30.", "What does os.path.join do?"):
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert ids.tolist() == [AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids]
        assert greedy(model, ids) == greedy(loaded, ids)
