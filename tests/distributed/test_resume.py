"""Sharded runs go on to the bit, keep a signature where their engine unpickles, and are one run over all ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from sft_play.record.manifest import folder_problem
from tests.distributed.runs import CASES, Outcome, run_case
from tests.faults.hooks import hooked
from tests.tiny import Workplace

SAVING = {"TRAIN_SAVE_STRATEGY": "steps", "TRAIN_SAVE_STEPS": "3", "TRAIN_MAX_STEPS": "6"}


@pytest.mark.slow
def test_a_resumed_run_of_tensor_parallel_is_the_straight_one_to_the_bit(workplace: Workplace) -> None:
    """The other strategies: tests/faults/test_resume_equality.py."""
    case = CASES["tp"]
    done = run_case(workplace, "full", case, "straight", **SAVING)
    assert done.code == 0, done.out[-1500:] + done.err
    straight, resumed = (Outcome(workplace.path / "runs" / one) for one in ("straight", "resumed"))
    shutil.copytree(straight.path, resumed.path)
    for left in ("record.json", "adapter", "model", "checkpoints/step-6"):
        shutil.rmtree(resumed.path / left, ignore_errors=True)
    (resumed.path / "record.json").unlink()
    done = run_case(workplace, "full", case, "resumed", **SAVING)
    assert done.code == 0, done.out[-1500:] + done.err
    assert "resuming from runs/resumed/checkpoints/step-3" in done.out
    assert resumed.series("loss") == straight.series("loss")
    ours, theirs = resumed.weights, straight.weights
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_weights_of_a_sharded_checkpoint_are_whole_files(workplace: Workplace) -> None:
    done = run_case(workplace, "full", CASES["fsdp"], "whole", **SAVING)
    assert done.code == 0, done.err
    checkpoint = workplace.path / "runs/whole/checkpoints/step-6"
    assert (checkpoint / "model.safetensors").read_bytes() == (
        workplace.path / "runs/whole/model/model.safetensors"
    ).read_bytes()
    assert {file.name for file in checkpoint.glob("optimizer*")} == {"optimizer-0.pt", "optimizer-1.pt"}
    assert not list(checkpoint.glob("*.distcp"))


def test_a_deepspeed_checkpoint_of_another_user_is_loaded_only_on_their_word(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"XDG_CONFIG_HOME": str(tmp_path / "mine")}
    assert run_case(workplace, "lora", CASES["zero2"], "signed", **SAVING, **keys).code == 0
    key = tmp_path / "mine/sft-play/key"
    assert key.stat().st_mode & 0o077 == 0
    run = workplace.path / "runs/signed"
    (run / "record.json").unlink()
    shutil.rmtree(run / "checkpoints/step-6")
    other = {"XDG_CONFIG_HOME": str(tmp_path / "other")}
    refused = run_case(workplace, "lora", CASES["zero2"], "signed", **SAVING, **other)
    assert refused.code == 3
    (line,) = refused.error_lines
    assert "no signature of this user" in line
    assert "--trust-checkpoint" in line
    trusted = run_case(workplace, "lora", CASES["zero2"], "signed", ARGS="--trust-checkpoint", **SAVING, **other)
    assert trusted.code == 0, trusted.err
    assert "resuming from" in trusted.out


def test_another_strategy_does_not_go_on_with_the_checkpoint(workplace: Workplace) -> None:
    assert run_case(workplace, "lora", CASES["ddp"], "one", **SAVING).code == 0
    (workplace.path / "runs/one/record.json").unlink()
    refused = run_case(workplace, "lora", CASES["fsdp"], "one", **SAVING)
    assert refused.code == 3
    assert "of another run: strategy" in refused.error_lines[0]
    assert refused.error_lines[2].split() == ["error:", "strategy", "ddp", "fsdp"]


def test_a_rank_that_fails_is_named_and_takes_the_others_with_it(workplace: Workplace) -> None:
    """A learning rate that blows up: every rank sees the same infinite norm, the first line is the cause."""
    done = run_case(workplace, "full", CASES["ddp"], "nan", TRAIN_LEARNING_RATE="1e30", TRAIN_WARMUP="0")
    assert done.code == 5, done.out[-500:] + done.err
    (line,) = done.error_lines
    assert "step 2" in line or "step 3" in line
    record = json.loads((workplace.path / "runs/nan/record.json").read_text())
    assert record["outcome"] == "LossNotFiniteError"


@pytest.mark.slow
def test_what_only_ddp_knows_reaches_ddp_and_is_refused_elsewhere(workplace: Workplace) -> None:
    ddp = {"TRAIN_DDP_BUCKET_CAP_MB": "1", "TRAIN_DDP_STATIC_GRAPH": "true", "TRAIN_MAX_STEPS": "2"}
    assert run_case(workplace, "lora", CASES["ddp"], "ddp", NCCL_TIMEOUT="600", **ddp).code == 0
    refused = run_case(workplace, "lora", CASES["fsdp"], "fsdp", **ddp)
    assert refused.code == 2
    assert "train.ddp_bucket_cap_mb: it has no effect under fsdp" in refused.error_lines[0]


def test_a_disk_for_offload_that_is_not_there_is_said_before_anything_loads(workplace: Workplace) -> None:
    refused = run_case(workplace, "full", CASES["zero3-offload"], "nvme", DIST_NVME_PATH="absent")
    assert refused.code == 2
    assert "dist.nvme_path: no folder absent" in refused.error_lines[0]
    assert "loading" not in refused.out


def test_the_key_is_made_once_by_whoever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft_play.record.signature import is_signed, read_or_make_key, sign

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_or_make_key() == read_or_make_key()
    manifest = {"files": {"a": {"bytes": 1}}, "step": 3}
    signed = {**manifest, "signature": sign(manifest)}
    assert is_signed(signed)
    assert not is_signed({**signed, "step": 4})
    assert not is_signed(manifest)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert not is_signed(signed)
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "locked"))
        assert sign(manifest) == ""


HALF_WRITTEN = """
import time, pathlib
def patch(module):
    real = module.torch.save
    def save(value, path, *items, **named):
        if rank == 1:  # another rank looks at the folder while this file is not whole
            pathlib.Path(path).write_bytes(b"half")
            time.sleep(1.5)
        return real(value, path, *items, **named)
    module.torch.save = save
"""


@pytest.mark.slow
def test_a_rank_that_writes_slowly_does_not_spoil_the_checkpoint(workplace: Workplace, tmp_path: Path) -> None:
    given = {"CONFIG": "tiny.yaml", "NUM_GPUS": "2", "DIST_STRATEGY": "ddp", "TRAIN_BATCH_SIZE": "2"}
    done = workplace.run(
        "train-distributed", **given, **hooked(tmp_path / "hook", "transformers.trainer", HALF_WRITTEN)
    )
    assert done.code == 0, done.err
    for folder in (workplace.path / "runs/tiny/checkpoints").iterdir():
        assert folder_problem(folder) == ""
