"""`make config`: what a person and what a program read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import BASE

from sft_play.cli import config
from sft_play.cli.config import main
from sft_play.config.keys import KEYS, SECTIONS
from sft_play.config.not_yet import NotYet
from sft_play.errors import SftPlayError

TEXT = BASE + "lr: 1e-4\ntrain:\n  batch_size: 4\ndist: {strategy: ddp}\n"


@pytest.fixture(autouse=True)
def _config() -> None:
    Path("x.yaml").write_text(TEXT)


def _rows(text: str) -> dict[str, list[str]]:
    """`section.key` -> [value, origin], read from the table."""
    rows, section = {}, ""
    for line in text.splitlines():
        if line in SECTIONS:
            section = line
        elif line.startswith("  "):
            leaf, rest = line.split(maxsplit=1)
            rows[f"{section}.{leaf}"] = [part.strip() for part in rest.split("  ", 1)]
    return rows


def test_every_value_stands_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"CONFIG": "x.yaml", "TRAIN_BATCH_SIZE": "1"}) == 0
    out, err = capsys.readouterr()
    rows = _rows(out)
    assert sorted(rows) == sorted(KEYS)
    assert rows["model.name"] == ["some/model", "x.yaml:1"]
    assert rows["train.batch_size"] == ["1", "environment TRAIN_BATCH_SIZE, instead of 4 (x.yaml:5)"]
    assert rows["train.learning_rate"] == ["1e-4", "x.yaml:3 as lr"]
    assert rows["train.epochs"] == ["1", "default"]
    assert rows["dist.strategy"] == ["ddp", "x.yaml:6"]
    assert "1 from the environment, 5 from the file, 119 defaults" in out
    assert err == "note: x.yaml:3: lr is an old name of train.learning_rate, and was taken as that\n"
    assert "\x1b" not in out


def test_the_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    main([], {"CONFIG": "x.yaml"})
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.endswith("default")
    ]
    assert len({line.index("default", len(line) - 7) for line in lines}) == 1
    assert len(lines) > 100


@pytest.mark.parametrize("name", ["train.learning_rate", "TRAIN_LEARNING_RATE", "lr", "learning_rate"])
def test_one_key_is_explained(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([], {"CONFIG": "x.yaml", "KEY": name, "TRAIN_LEARNING_RATE": "1e-5"}) == 0
    out = capsys.readouterr().out
    assert out.startswith("train.learning_rate = 1e-5\n  Peak learning rate.\n")
    rows = [line.strip().split("  ", 1) for line in out.splitlines()[3:]]
    assert [(row[0], row[1].strip()) for row in rows] == [
        ("takes", "a number (0 or more)"),
        ("default", "2e-4"),
        ("comes from", "environment TRAIN_LEARNING_RATE"),
        ("instead of", "1e-4, x.yaml:3"),
        ("instead of", "2e-4, default"),
        ("variable", "TRAIN_LEARNING_RATE"),
        ("old names", "lr"),
    ]


def test_a_section_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main([], {"CONFIG": "x.yaml", "KEY": "tuning"})
    assert set(_rows(capsys.readouterr().out)) == {key for key in KEYS if key.startswith("tuning.")}


def test_a_wrong_key_names_the_nearest() -> None:
    for name, said in {
        "train.learnin_rate": "nearest is train.learning_rate",
        "validation": "may be data.validation or",
    }.items():
        with pytest.raises(SftPlayError, match=said):
            main([], {"CONFIG": "x.yaml", "KEY": name})


def test_without_a_config_a_key_is_still_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"KEY": "train.seed"}) == 0
    assert main([], {}) == 0
    out = capsys.readouterr().out
    assert "train.seed = 42" in out
    assert "needed: MODEL_NAME=..." in out
    assert "2 still to be set" in out


def test_what_is_not_available_yet_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "NOT_YET", (NotYet(key="tuning.backend", values=("unsloth",)),))
    environ = {"CONFIG": "x.yaml", "TUNING_BACKEND": "unsloth"}
    main([], environ)
    assert _rows(capsys.readouterr().out)["tuning.backend"][1].endswith("[not available yet]")
    main(["--json"], environ)
    assert not json.loads(capsys.readouterr().out)["values"]["tuning.backend"]["available"]


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"], {"CONFIG": "x.yaml", "TRAIN_BATCH_SIZE": "1"})
    all_of_it = json.loads(capsys.readouterr().out)
    assert all_of_it["config"] == "x.yaml"
    assert list(all_of_it["values"]) == list(KEYS)
    batch = all_of_it["values"]["train.batch_size"]
    assert (batch["value"], batch["default"], batch["variable"]) == (1, "auto", "TRAIN_BATCH_SIZE")
    assert batch["origin"] == {
        "kind": "environment", "where": "environment TRAIN_BATCH_SIZE", "value": 1, "given_as": None,
    }  # fmt: skip
    assert [one["where"] for one in batch["overrode"]] == ["x.yaml:5", "default"]
    assert all_of_it["values"]["train.learning_rate"]["origin"]["given_as"] == "lr"
    assert batch["available"]
    main(["--json"], {"CONFIG": "x.yaml", "TRAIN_BATCH_SIZE": "1", "KEY": "train.batch_size"})
    assert json.loads(capsys.readouterr().out) == batch


def test_warnings_go_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"], {"CONFIG": "x.yaml", "TRAIN_BATCHSIZE": "1"})
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"]
    assert "warning: TRAIN_BATCHSIZE: " in err


def test_an_unknown_flag_is_one_line() -> None:
    with pytest.raises(SftPlayError):
        main(["--jsn"], {"CONFIG": "x.yaml"})
