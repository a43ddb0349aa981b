"""The real program on packs: the losses of padded rows, and other ones where the boundaries are lost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import Workplace, make_rows

STEPS = 20
# The whole data set is one step, so that packs and rows hold the same in each.
WHOLE = {
    "TRAIN_BATCH_SIZE": "8",
    "TRAIN_MAX_STEPS": str(STEPS),
    "TRAIN_LEARNING_RATE": "1e-3",
    "TRAIN_EVAL_STRATEGY": "no",
    "TRAIN_SAVE_STRATEGY": "no",
    "MODEL_MAX_SEQ_LEN": "200",
}


def train_whole(workplace: Workplace, mode: str, name: str, **variables: str) -> list[float]:
    workplace.config["tuning"] = {"mode": mode, "lora": {"r": 4, "alpha": 8}} if mode == "lora" else {"mode": mode}
    workplace.write()
    make_rows(workplace.path / "train.jsonl", 8)
    done = workplace.train(RUN_NAME=name, **WHOLE, **variables)
    assert done.code == 0, done.out[-2000:] + done.err
    return workplace.losses(name)


def weights(workplace: Workplace, name: str) -> dict[str, torch.Tensor]:
    (file,) = [
        path for part in ("adapter", "model") for path in workplace.path.glob(f"runs/{name}/{part}/*.safetensors")
    ]
    return load_file(file)


@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_packs_train_like_the_same_rows_padded(workplace: Workplace, mode: str) -> None:
    padded = train_whole(workplace, mode, "padded")
    packed = train_whole(workplace, mode, "packed", DATA_PACKING="true")
    assert len(packed) == STEPS
    assert packed[0] == pytest.approx(padded[0], abs=1e-6)
    assert packed == pytest.approx(padded, abs=5e-5)
    ours, theirs = weights(workplace, "packed"), weights(workplace, "padded")
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-5
    log = (workplace.path / "runs/packed/run.log").read_text()
    assert re.search(r"packing: documents come out as alone, to \de-\d+ of their size \(bound 0.0001\)", log)
    tokens = [[event["num_tokens"] for event in events(workplace, name)] for name in ("packed", "padded")]
    assert tokens[0] == tokens[1]  # padding is not counted


def events(workplace: Workplace, name: str) -> list[dict[str, float]]:
    lines = (workplace.path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "train"]


def join_documents(workplace: Workplace) -> None:
    """Make one document of each prepared pack, as if its boundaries were lost."""
    (entry,) = [path.parent for path in workplace.path.glob("runs/.cache/tokens/*/train.arrow")]
    with pa.ipc.open_stream((entry / "train.arrow").read_bytes()) as stream:
        packs = stream.read_all()
    whole = pa.array([[sum(one)] for one in packs.column("lengths").to_pylist()], pa.list_(pa.int32()))
    joined = packs.set_column(packs.schema.get_field_index("lengths"), packs.schema.field("lengths"), whole)
    with pa.OSFile(str(entry / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, joined.schema) as stream:
        stream.write_table(joined)
    manifest = json.loads((entry / "manifest.json").read_text())
    facts = json.loads(manifest["facts"])
    facts["splits"]["train"]["longest"] = max(sum(one) for one in packs.column("lengths").to_pylist())
    manifest["facts"] = json.dumps(facts)
    manifest["bytes"]["train.arrow"] = (entry / "train.arrow").stat().st_size
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_without_boundaries_the_losses_are_others(workplace: Workplace) -> None:
    """The comparison above would notice."""
    apart = train_whole(workplace, "full", "apart", DATA_PACKING="true")
    join_documents(workplace)
    joined = train_whole(workplace, "full", "joined", DATA_PACKING="true")
    log = (workplace.path / "runs/joined/run.log").read_text()
    assert "no pack holds two documents, so there is no boundary to prove" in log
    assert abs(joined[0] - apart[0]) > 1e-5
    assert max(abs(one - other) for one, other in zip(joined, apart, strict=True)) > 1e-4


def test_packs_beside_validation_rows_that_are_not_packed(workplace: Workplace) -> None:
    done = workplace.train(DATA_PACKING="true", TRAIN_MAX_STEPS="none", TRAIN_EPOCHS="1", TRAIN_BATCH_SIZE="2")
    assert done.code == 0, done.err
    packs = int(re.search(r"packed into (\d+) sequences", done.out)[1])  # type: ignore[index]
    assert workplace.record()["steps"] == -(-packs // 2)
    assert workplace.record()["eval_loss"] > 0


def test_resuming_in_the_middle_of_an_epoch_of_packs_is_the_straight_run(workplace: Workplace) -> None:
    saving = {"TRAIN_SAVE_STRATEGY": "steps", "TRAIN_SAVE_STEPS": "5", "TRAIN_MAX_STEPS": "10", "TRAIN_BATCH_SIZE": "2"}
    assert workplace.train(RUN_NAME="straight", DATA_PACKING="true", **saving).code == 0
    runs = workplace.path / "runs"
    shutil.copytree(runs / "straight", runs / "resumed")
    for left in ("adapter", "checkpoints/step-10"):
        shutil.rmtree(runs / "resumed" / left, ignore_errors=True)
    (runs / "resumed/record.json").unlink()
    done = workplace.train(RUN_NAME="resumed", DATA_PACKING="true", **saving)
    assert done.code == 0, done.err
    assert "resuming from runs/resumed/checkpoints/step-5" in done.out
    assert workplace.losses("resumed") == workplace.losses("straight")
    ours, theirs = weights(workplace, "resumed"), weights(workplace, "straight")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_that_loses_the_boundaries_is_refused_before_the_first_step(
    workplace: Workplace, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(workplace.model)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers = ["conv", "full_attention"]
    config = Lfm2Config(vocab_size=len(tokenizer), num_key_value_heads=2, layer_types=layers, eos_token_id=1, **shape)
    folder = tmp_path / "convolutions"
    shutil.copytree(workplace.model, folder)
    Lfm2ForCausalLM(config).save_pretrained(folder)
    settings = {"MODEL_NAME": str(folder), "TUNING_MODE": "full", "TRAIN_EVAL_STRATEGY": "no"}
    done = workplace.train(DATA_PACKING="true", **settings)
    assert done.code == 2, done.out + done.err
    (line,) = done.error_lines
    assert "lfm2 with attention sdpa" in line
    assert line.endswith("-> train without packing: DATA_PACKING=false")
    assert workplace.losses() == [] if (workplace.path / "runs/tiny/metrics.jsonl").exists() else True
