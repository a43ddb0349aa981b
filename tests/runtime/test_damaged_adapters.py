"""Adapters that are damaged or made up: each is refused by name before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sft_play.errors import ModelError
from sft_play.facts.locate import check_model_folder
from sft_play.runtime.adapter_file import PREFIX, read_adapter
from sft_play.runtime.shard_files import piece_of

MODULE = "model.layers.0.mlp.up_proj"


def written(folder: Path, down: torch.Tensor | None = None, **settings: Any) -> Path:
    """An adapter of rank 4 on one module."""
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    tensors = {"A": torch.zeros(4, 3) if down is None else down, "B": torch.zeros(5, 4)}
    named = {f"{PREFIX}{MODULE}.lora_{part}.weight": tensor for part, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, None])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    file = written(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9] if content is None else content)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: cannot be read"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", "four"),
        ("r", 0),
        ("lora_alpha", "x"),
        ("lora_alpha", float("nan")),
        ("rank_pattern", [1]),
        ("rank_pattern", {"(": 3}),
        ("alpha_pattern", {"up_proj": None}),
        ("target_modules", 5),
        ("modules_to_save", 5),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"adapter_config.json: {name}: "):
        read_adapter(written(tmp_path, **{name: value}))


@pytest.mark.parametrize("shape", [(), (4,), (4, 3, 7), (3, 4)])
def test_matrices_that_are_no_pair(tmp_path: Path, shape: tuple[int, ...]) -> None:
    adapter = read_adapter(written(tmp_path, torch.zeros(shape)))
    with pytest.raises(ModelError, match="no pair of matrices"):
        adapter.applied(f"{MODULE}.weight", torch.zeros(5, 3))


def test_a_whole_one_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(written(tmp_path, modules_to_save=None, rank_pattern={}, target_modules="all-linear"))
    assert torch.equal(adapter.applied(f"{MODULE}.weight", torch.ones(5, 3)), torch.ones(5, 3))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "index.json is damaged"),
        ('{"weight_map": 5}', "index.json is damaged"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "no file of this folder"),
    ],
)
def test_a_base_whose_index_is_damaged(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Exception, match=words):
        check_model_folder(tmp_path, "base")


def test_a_tensor_that_the_file_does_not_hold(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="b is not in it"):
        piece_of("b", tmp_path / "model.safetensors")
