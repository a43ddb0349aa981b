"""Going on with another config: which keys have to match and which are free, for every key there is."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.keys import KEYS
from sft_play.config.schema import Config
from sft_play.errors import ResumeRefusedError
from sft_play.record.checkpoints import refuse_another_run
from sft_play.record.run_dir import FREE_TRAIN_KEYS, must_match
from sft_play.record.stamp import MAY_BE_FORCED, NEVER_DIFFERS, VERSION, flat
from tests.tiny import Workplace

CONFIG = Config.model_validate({"model": {"name": "m"}, "data": {"train": "t", "columns": {"prompt": "q"}}})
STAMP: dict[str, Any] = {
    "version": VERSION, "sft_play": "1", "backend": "bnb", "mode": "lora", "quantization": None, "adapter": {"r": 16},
    "base_model": "m", "base_identity": "b", "tokenizer_hash": "t", "template_hash": "c", "strategy": "single",
    "world_size": 1, "precision": {"weights": "bf16", "autocast": "bf16"}, "global_batch": 32,
    "data_fingerprint": "d", "settings": flat(must_match(CONFIG)),
}  # fmt: skip
SAVING = ("logging_", "save_", "eval_", "predict_", "generation_")


def is_free(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in ("run", "dist") or (section == "train" and name.startswith(FREE_TRAIN_KEYS))


def refused(made: dict[str, Any], now: dict[str, Any], *, force: bool = False) -> ResumeRefusedError:
    with pytest.raises(ResumeRefusedError) as found:
        refuse_another_run(Path("runs/x/checkpoints/step-4"), made, now, force=force)
    assert found.value.exit_code == 3
    return found.value


@pytest.mark.parametrize("key", KEYS)
def test_each_key(key: str) -> None:
    """Changed in the stamp's settings: a key that must match is refused with both values; a free one is not there."""
    now = deepcopy(STAMP)
    held = [name for name in now["settings"] if name == key or name.startswith(f"{key}.")]
    assert bool(held) != is_free(key), "each key is in one of the two classes"
    for name in held:
        now["settings"][name] = "another"
    if not held:
        assert refuse_another_run(Path("x"), STAMP, now, force=False) == []
        return
    error = refused(STAMP, now)
    assert error.table[0] == ("", "made by", "this run")
    assert (held[0], str(STAMP["settings"][held[0]]), "another") in error.table
    assert "ARGS=--force" in error.fix
    (said,) = [line for line in refuse_another_run(Path("x"), STAMP, now, force=True) if line.startswith(held[0])]
    assert said == f"{held[0]} {STAMP['settings'][held[0]]} -> another"


def test_saving_logging_and_evaluation_are_free() -> None:
    for key in KEYS:
        assert not key.startswith(tuple(f"train.{start}" for start in SAVING)) or is_free(key)
    for key in ("model.name", "data.train", "train.seed", "train.learning_rate", "train.on_spike", "tuning.mode"):
        assert not is_free(key)


@pytest.mark.parametrize("field", [*NEVER_DIFFERS, *MAY_BE_FORCED])
def test_each_field_of_the_stamp(field: str) -> None:
    now = {**STAMP, field: "another"}
    error = refused(STAMP, now)
    assert (field, str(STAMP[field]), "another") in error.table
    if field in NEVER_DIFFERS:
        assert "--force" not in refused(STAMP, now, force=True).fix
    else:
        assert refuse_another_run(Path("x"), STAMP, now, force=True) == [f"{field} {STAMP[field]} -> another"]


def test_stamps_of_other_versions() -> None:
    newer = {**STAMP, "version": VERSION + 1, "sft_play": "9.9"}
    assert "made by a newer sft-play (9.9)" in refused(newer, STAMP, force=True).line()
    older = {key: value for key, value in STAMP.items() if key != "settings"} | {"version": 1, "config_hash": "h"}
    assert refuse_another_run(Path("x"), older, {**STAMP, "config_hash": "h"}, force=False) == []
    assert "config_hash" in refused(older, {**STAMP, "config_hash": "other"}).line()


def unfinished(workplace: Workplace) -> None:
    """A run of two steps that looks as if it had ended after them."""
    workplace.write(train={**workplace.config["train"], "max_steps": 2, "save_steps": 2, "eval_strategy": "no"})
    assert workplace.train().code == 0
    (workplace.path / "runs/tiny/record.json").unlink()


@pytest.mark.fault
def test_whole_runs_with_other_data_or_mode_are_refused(workplace: Workplace) -> None:
    unfinished(workplace)
    file = workplace.path / "train.jsonl"
    rows = file.read_text().splitlines()
    edited = json.loads(rows[0])
    edited["messages"][1]["content"] += " Indeed."
    changes = {"edit": [json.dumps(edited), *rows[1:]], "reorder": rows[::-1], "append": [*rows, rows[0]]}
    for name, changed in changes.items():
        file.write_text("\n".join(changed) + "\n")
        done = workplace.train()
        assert done.code == 3, (name, done.err)
        assert "of another run: data_fingerprint" in done.error_lines[0]
    file.write_text("\n".join(rows) + "\n")
    done = workplace.train(TUNING_MODE="full")
    assert done.code == 3, done.err
    assert [line.split() for line in done.error_lines if " mode " in line] == [["error:", "mode", "lora", "full"]]
