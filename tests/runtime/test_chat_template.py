"""A chosen chat template goes with the result, and inference stops where that template taught it to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sft_play.data.builtin import read_built_in
from sft_play.data.template import load_text_tokenizer
from sft_play.runtime.generate import end_token_ids, load_speaker
from sft_play.runtime.model import load_tokenizer
from tests.tiny import Workplace


@pytest.fixture
def base_model(workplace: Workplace) -> Path:
    """A base whose own end of text is another token than a chat's end of turn, and that has no template."""
    base = shutil.copytree(workplace.model, workplace.path / "base")
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    eos = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|endoftext|>")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((base / name).read_text()) | {"eos_token_id": eos, "pad_token_id": eos}
        (base / name).write_text(json.dumps(values))
    return base


def test_a_built_in_template_is_saved_and_inference_stops_at_its_end(workplace: Workplace, base_model: Path) -> None:
    workplace.write(
        model={**workplace.config["model"], "name": str(base_model)},
        train={**workplace.config["train"], "max_steps": 2},
    )
    done = workplace.train(MODEL_CHAT_TEMPLATE="chatml")
    assert done.code == 0, done.err + done.out
    result = workplace.path / "runs/tiny/adapter"
    assert (result / "chat_template.jinja").read_text() == read_built_in("chatml")
    tokenizer = AutoTokenizer.from_pretrained(result)
    chat = [{"role": "user", "content": "q"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    saved = json.loads((result / "generation_config.json").read_text())["eos_token_id"]
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert sorted(saved) == sorted(ends)
    speaker = load_speaker(base_model, result)
    assert speaker.end_ids == sorted(ends)
    assert speaker.prompt_ids(chat)[0].tolist() == tokenizer(prompt, add_special_tokens=False).input_ids


def test_a_template_without_tokens_of_its_own_is_saved_and_ends_with_eos(base_model: Path, tmp_path: Path) -> None:
    load_tokenizer(base_model, "plain").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/chat_template.jinja").read_text() == read_built_in("plain")
    saved = load_text_tokenizer(tmp_path / "saved")
    assert end_token_ids(saved, None) == [saved.tokenizer.token_to_id("<|endoftext|>")]


def test_without_a_template_the_choices_are_listed(workplace: Workplace, base_model: Path) -> None:
    workplace.write(model={**workplace.config["model"], "name": str(base_model)})
    done = workplace.train()
    assert done.code == 2
    assert len(done.error_lines) == 1
    assert "set model.chat_template to one of chatml, llama3, gemma, mistral, alpaca, plain" in done.error_lines[0]
