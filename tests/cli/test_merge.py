"""`merge`, `export` and `push` of a finished tiny run: the commands of docs/results.md, in their order."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sft_play.record.manifest import folder_problem
from tests.cli.hub import Hub, hub
from tests.tiny import ROOT, Done, Workplace, make_workplace

PAGE = (ROOT / "docs/results.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(make .*)$", re.findall(r"```sh\n(.*?)```", PAGE, re.S)[0], re.M)
TOKEN = "hf_" + "t" * 30


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub() as found:
        yield found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workplace:
    """A finished run, on a copy of the tiny model that has a licence."""
    place = tmp_path_factory.mktemp("merge")
    base = place / "models" / "tiny-base"
    shutil.copytree(tiny_model, base)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n")
    workplace = make_workplace(place, base)
    done = workplace.train(TRAIN_LEARNING_RATE="0.05", TRAIN_MAX_STEPS="8")
    assert done.code == 0, done.err
    return workplace


def typed(workplace: Workplace, command: str, server: Hub, **more: str) -> Done:
    """A `make` command line, its variables in the environment as make puts them there."""
    _, target, *given = shlex.split(command.replace("runs/NAME", "runs/tiny"))
    variables = dict(word.split("=", 1) for word in given)
    online = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    named = {"SFT_PLAY_MAKE_VARIABLES": " ".join(variables)}
    return workplace.run(target, **{**named, **variables, **(online if target == "push" else {}), **more})


@pytest.fixture(scope="module")
def said(trained: Workplace, server: Hub) -> dict[str, Done]:
    """Every command of the page, done."""
    found = {}
    for command in COMMANDS:
        done = typed(trained, command, server)
        assert done.code == 0, f"{command}\n{done.out}{done.err}"
        found[command] = done
    return found


def test_merged_is_what_base_and_adapter_compute(said: dict[str, Done], trained: Workplace) -> None:
    run = trained.path / "runs/tiny"
    ids = torch.tensor([[5, 40, 77, 120, 9, 200]])
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(run / "model")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(trained.model)
        apart = PeftModel.from_pretrained(base, run / "adapter").eval()(ids).logits
    assert (whole - apart).abs().max() < 1e-5
    assert folder_problem(run / "model") == ""
    out = said[COMMANDS[0]].out
    assert "logits on 4 rows" in out
    assert "likeliest token the same at 100.0%" in out


def test_the_card_is_written_from_the_record(said: dict[str, Done], trained: Workplace) -> None:
    card = (trained.path / "runs/tiny/model/README.md").read_text()
    assert "license: apache-2.0\n" in card
    assert "library_name: transformers\n" in card
    assert "A fine-tune of tiny-base" in card
    assert "| Trained on | train.jsonl |" in card
    assert "| Rows, train | 32" in card
    record = trained.record()
    assert f"| Held-out loss | {record['eval_loss']:.4f}" in card
    assert "| Method | LoRA r 4, alpha 8 |" in card
    assert str(trained.path) not in card


def test_the_exported_folder_is_the_merged_one(said: dict[str, Done], trained: Workplace) -> None:
    made, exported = trained.path / "runs/tiny/model", trained.path / "finished"
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in made.iterdir())
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(names)
    assert "loaded by transformers in a fresh process" in said[COMMANDS[1]].out


def test_the_gguf_file_is_there_with_its_modelfile(said: dict[str, Done], trained: Workplace) -> None:
    folder = trained.path / "runs/tiny/gguf"
    assert len(GGUFReader(folder / "tiny-q8_0.gguf").tensors) == len(
        load_file(trained.path / "runs/tiny/model/model.safetensors")
    )
    text = (folder / "Modelfile").read_text()
    assert text.startswith("FROM ./tiny-q8_0.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_the_result_is_pushed_privately_and_nothing_else(
    said: dict[str, Done], trained: Workplace, server: Hub
) -> None:
    assert server.repositories["you/name"] is True
    sent = server.files["you/name"]
    folder = trained.path / "runs/tiny/model"
    wanted = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert set(sent) == wanted
    assert sent["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert server.tokens == {f"Bearer {TOKEN}"}
    everything = " ".join(server.asked) + "".join(done.out + done.err for done in said.values())
    assert TOKEN not in everything
    assert not any(str(trained.path).encode() in content for name, content in sent.items() if name != "tokenizer.json")


def test_a_pushed_adapter_names_no_place_of_this_machine(
    said: dict[str, Done], trained: Workplace, server: Hub
) -> None:
    done = typed(trained, "make push RUN=runs/NAME REPO=you/adapter ARGS='--adapter --yes --public'", server)
    assert done.code == 0, done.err
    assert server.repositories["you/adapter"] is False
    settings = json.loads(server.files["you/adapter"]["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "tiny-base"
    assert b"A LoRA adapter for tiny-base" in server.files["you/adapter"]["README.md"]
    done = typed(trained, "make push RUN=runs/NAME REPO=you/adapter ARGS='--adapter --yes'", server)
    assert (done.code, "there and public" in done.err) == (2, True)


PUSH = "make push RUN=runs/NAME REPO=you/other ARGS="


@pytest.mark.parametrize(
    ("command", "more", "code", "words"),
    [
        (PUSH + "'--merged --yes'", {"HF_TOKEN": ""}, 4, "there is no token"),
        (PUSH + "--merged", {}, 2, "nobody is there to ask"),
        (PUSH + "--yes", {}, 2, "an adapter and a merged model"),
        (PUSH + "'--merged --yes'", {"HF_ENDPOINT": "http://127.0.0.1:9"}, 4, "cannot be reached"),
        (PUSH + "'--merged --yes'", {"HF_HUB_OFFLINE": "1"}, 4, "HF_HUB_OFFLINE"),
        ("make push RUN=runs/NAME REPO=other", {}, 2, "'other' is no repository"),
        ("make export RUN=runs/NAME FORMAT=onnx", {}, 2, "no format 'onnx'"),
        ("make export RUN=runs/NAME ARGS=--ollama", {}, 2, "go with FORMAT=gguf"),
        ("make export RUN=runs/NAME ARGS='--output models/tiny-base'", {}, 2, "did not write"),
        ("make export FORMAT=gguf MODEL=x", {}, 2, "--output is missing"),
        ("make merge RUN=runs/none", {}, 2, "there is no run"),
        ("make merge MODEL=models/tiny-base", {}, 2, "MODEL and ADAPTER"),
        ("make merge RUN=runs/NAME ARGS='--output models/tiny-base'", {}, 2, "no merge has written"),
        ("make merge RUN=runs/NAME ARGS='--output runs/tiny/adapter --force'", {}, 2, "which it is made from"),
        ("make merge RUN=runs/NAME ARGS='--bound nan'", {}, 2, "must be above 0"),
        ("make export RUN=runs/NAME ARGS='--output train.jsonl --force'", {}, 2, "a file is there that this"),
        (
            "make export RUN=runs/NAME FORMAT=gguf ARGS='--output train.jsonl --force'",
            {},
            2,
            "a file is there that this",
        ),
    ],
)
def test_mistakes_are_one_line(
    said: dict[str, Done], trained: Workplace, server: Hub, command: str, more: dict[str, str], code: int, words: str
) -> None:
    done = typed(trained, command, server, HOME=str(trained.path), **more)
    assert done.code == code, done.err
    assert len(done.error_lines) == 1
    assert words in done.error_lines[0]
    assert "Traceback" not in done.err
    assert TOKEN not in done.out + done.err
    assert "you/other" not in server.repositories


def test_a_damaged_result_is_not_pushed(said: dict[str, Done], trained: Workplace, server: Hub, tmp_path: Path) -> None:
    shutil.copytree(trained.path / "runs/tiny", tmp_path / "tiny")
    with (tmp_path / "tiny/model/config.json").open("a") as stream:
        stream.write(" ")
    done = typed(trained, f"make push RUN={tmp_path / 'tiny'} REPO=you/other ARGS='--merged --yes'", server)
    assert (done.code, "the result is not whole: config.json" in done.err) == (2, True)


def test_a_damaged_result_is_not_merged(said: dict[str, Done], trained: Workplace, server: Hub, tmp_path: Path) -> None:
    shutil.copytree(trained.path / "runs/tiny", tmp_path / "tiny")
    file = tmp_path / "tiny/adapter/adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    done = typed(trained, f"make merge RUN={tmp_path / 'tiny'}", server)
    assert (done.code, "the result is not whole: adapter_model.safetensors differs" in done.err) == (2, True)


@pytest.mark.slow
def test_a_merge_that_computes_something_else_is_removed(trained: Workplace, server: Hub, tmp_path: Path) -> None:
    """What is compared is what lies on the disk: here a base that changes between the merge and the check."""
    from sft_play.errors import ResultDiffersError
    from sft_play.runtime.merge import MergeOrder, merge
    from sft_play.runtime.merge_check import Comparison, compare

    adapter = trained.path / "runs/tiny/adapter"
    order = MergeOrder(
        base=trained.model, adapter=adapter, output=tmp_path / "out", dtype=None, trust_remote_code=False, stamp={}
    )
    comparison = Comparison(
        base=trained.model, adapter=adapter, rows=[[5, 40, 77]], dtype="fp32", bound=1e-5, trust_remote_code=False
    )

    def check(folder: Path) -> dict[str, object]:
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.0.mlp.up_proj.weight"] *= 1.001
        save_file(weights, file, metadata={"format": "pt"})
        return compare(comparison, folder)

    with pytest.raises(ResultDiffersError, match="the bound is 1e-05; it was removed"):
        merge(order, check, lambda folder, found: None)
    assert list(tmp_path.iterdir()) == []
