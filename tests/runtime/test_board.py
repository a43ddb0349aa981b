"""What TensorBoard keeps of a run beside its figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerControl, TrainerState

from sft_play.runtime.board import BoardCallback, flat, write_board
from tests.launch.planned import make_config, make_plan

SECRET = "aVerySecretWord"


def test_no_secret_stands_in_config_hparams_or_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(run={"output_dir": f"/data/{SECRET}"}, data={"train": f"{SECRET}.jsonl"})
    told = SimpleNamespace(to_json_string=lambda: json.dumps({"output_dir": SECRET}))

    def written(folder: Path) -> bytes:
        board = BoardCallback(SummaryWriter(str(folder)))
        write_board(board.tb_writer, config, make_plan("ddp"))
        board.on_train_begin(told, TrainerState(), TrainerControl(), model=SimpleNamespace(config=told))
        board.tb_writer.close()
        (file,) = folder.iterdir()
        return file.read_bytes()

    assert written(tmp_path / "open").count(SECRET.encode()) >= 4
    monkeypatch.setenv("MY_API_KEY", SECRET)
    kept = written(tmp_path / "kept")
    assert SECRET.encode() not in kept
    assert kept.count(b"/data/***") >= 2
    assert flat(config)["run.output_dir"] == "/data/***"
