"""What is refused before a model is loaded: one line, the right code, no traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import ROOT, Workplace


def refused(workplace: Workplace, code: int, *parts: str, **variables: str) -> str:
    done = workplace.train(**variables)
    assert done.code == code, done.out + done.err
    assert len(done.error_lines) == 1, done.err
    assert "Traceback" not in done.out + done.err
    assert "loading" not in done.out
    for part in parts:
        assert part in done.error_lines[0]
    return done.error_lines[0]


def test_config_missing(workplace: Workplace) -> None:
    refused(workplace, 2, "CONFIG is missing", CONFIG="")
    refused(workplace, 2, "nowhere.yaml", CONFIG="nowhere.yaml")


def test_a_model_that_is_nowhere(workplace: Workplace) -> None:
    refused(workplace, 2, "no folder ./nope", MODEL_NAME="./nope")
    refused(workplace, 4, "owner/nope is not on this disk", MODEL_NAME="owner/nope")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "model.safetensors is cut off"),
        (lambda folder: cut(folder / "model.safetensors"), "where its header promises"),
    ],
)
def test_an_incomplete_model_folder(workplace: Workplace, tmp_path: Path, damage, said: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workplace.model, copy)
    damage(copy)
    refused(workplace, 2, said, MODEL_NAME=str(copy))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def test_a_gpu_that_is_not_there(workplace: Workplace) -> None:
    refused(workplace, 4, "dist.gpus", "no GPU is seen", DIST_GPUS="[0]")


def test_a_count_of_gpus_without_any_is_said(workplace: Workplace) -> None:
    done = workplace.train(DIST_GPUS="1", TRAIN_MAX_STEPS="1")
    assert done.code == 0, done.err
    assert "warning: no GPU is there: one process trains on the CPU" in done.err


def test_precisions_the_cpu_lacks(workplace: Workplace) -> None:
    refused(workplace, 2, "train.fp16", "needs a GPU", TRAIN_FP16="true")
    refused(workplace, 2, "model.attention", "needs a GPU", MODEL_ATTENTION="flash_attention_2")
    refused(workplace, 2, "train.tf32", "no TF32", TRAIN_TF32="true")
    refused(workplace, 2, "lm_head would never be trained", TUNING_LORA_TARGET_MODULES="q_proj,lm_head")
    refused(workplace, 2, "train.optim", "needs a GPU", TRAIN_OPTIM="paged_adamw_8bit")


def test_a_batch_that_does_not_divide(workplace: Workplace) -> None:
    refused(workplace, 2, "train.global_batch_size", TRAIN_GLOBAL_BATCH_SIZE="10")


def test_a_file_where_the_run_should_be(workplace: Workplace) -> None:
    (workplace.path / "taken").write_text("")
    refused(workplace, 4, "taken", RUN_OUTPUT_DIR="taken")


def test_a_foreign_folder_is_never_taken_over(workplace: Workplace) -> None:
    precious = workplace.path / "runs/tiny/precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    refused(workplace, 4, "no run of sft-play")
    assert precious.read_text() == "mine"


def test_data_that_is_not_there_or_empty(workplace: Workplace) -> None:
    refused(workplace, 2, "absent.jsonl", DATA_TRAIN="absent.jsonl")
    (workplace.path / "empty.jsonl").write_text("")
    refused(workplace, 2, "empty.jsonl", DATA_TRAIN="empty.jsonl")


def test_must_resume_and_cannot(workplace: Workplace) -> None:
    refused(workplace, 3, "there is no checkpoint", RUN_RESUME="must")


def test_a_target_module_that_the_model_lacks(workplace: Workplace) -> None:
    done = workplace.train(TUNING_LORA_TARGET_MODULES="q_porj")
    assert done.code == 2
    assert "q_proj" in done.error_lines[0]
    assert "Traceback" not in done.out + done.err


def test_a_module_to_save_that_the_model_lacks(workplace: Workplace) -> None:
    done = workplace.train(TUNING_LORA_MODULES_TO_SAVE="embed_tokenz")
    assert done.code == 2
    assert "no module embed_tokenz" in done.error_lines[0]


def test_rows_longer_than_the_model_has_positions(workplace: Workplace, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workplace.model, copy)
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 32'))
    refused(workplace, 2, "66 tokens and the model 32 positions", "MODEL_MAX_SEQ_LEN=32", MODEL_NAME=str(copy))


def test_weights_that_config_json_does_not_describe(workplace: Workplace, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workplace.model, copy)
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    done = workplace.train(MODEL_NAME=str(copy))
    assert done.code == 2, done.out + done.err
    assert "missing keys" in done.error_lines[0]
    assert "Traceback" not in done.out + done.err


def test_a_folder_below_a_file(workplace: Workplace) -> None:
    """What root meets of a place that cannot be written: its parent is a file."""
    (workplace.path / "taken").write_text("")
    refused(workplace, 4, "cannot write there", RUN_OUTPUT_DIR="taken/deep/er")


def test_a_hub_name_offline_fails_fast(workplace: Workplace) -> None:
    started = time.monotonic()
    line = refused(workplace, 4, "owner/nope is not on this disk", MODEL_NAME="owner/nope", HF_HUB_OFFLINE="1")
    assert " -> " in line
    assert time.monotonic() - started < 15


def test_two_starts_at_once_in_one_folder(tmp_path: Path) -> None:
    """Twenty times: exactly one holds the lock, the other is refused with 4; stopped winners leave nothing stale."""
    for number in range(20):
        words = [sys.executable, "-c", LOCKS, str(tmp_path / f"run-{number % 2}")]
        pair = [
            subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}
            )
            for _ in range(2)
        ]
        said = [one.stdout.readline().strip() for one in pair]
        for one in pair:
            one.communicate("\n")
        assert sorted(said) == ["4", "won"], said
        assert sorted(one.returncode for one in pair) == [0, 4]


# What a training command does before anything is loaded; the winner holds on until its input ends.
LOCKS = """
import sys
from pathlib import Path
from sft_play.errors import SftPlayError
from sft_play.record.run_dir import RunDir, locked

run = RunDir(Path(sys.argv[1]))
run.create()
try:
    with locked(run):
        print("won", flush=True)
        sys.stdin.readline()
except SftPlayError as error:
    print(int(error.exit_code), flush=True)
    sys.exit(int(error.exit_code))
"""
