"""`make data-check`: what it lists, what it refuses, and that a training finds its tokens."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from sft_play.cli.app import run
from sft_play.cli.train import report_data
from sft_play.config.schema import Config
from sft_play.data.prepare import prepare
from sft_play.record.run_dir import RunDir
from tests.data.tokenizers_made import make_tokenizer
from tests.tiny import ROOT, Done, Workplace, make_rows

BAD = ['{"messages": [{"role": "user", "content": "cut', '{"messages": [{"role": "user", "content": null}]}']


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A tokenizer without a model, 20 rows to train on and 4 held out."""
    made = Workplace(tmp_path, make_tokenizer("chatml", tmp_path))
    make_rows(tmp_path / "train.jsonl", 20)
    make_rows(tmp_path / "validation.jsonl", 4, first=100)
    made.config = {
        "model": {"name": str(made.model), "max_seq_len": 128},
        "data": {"train": "train.jsonl", "validation": "validation.jsonl"},
        "run": {"name": "tiny"},
    }
    made.write()
    return made


class Check:
    """The command inside the place, in this process."""

    def __init__(self, place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.model = place.path, place.model
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.chdir(place.path)

    def __call__(self, *words: str, **variables: str) -> Done:
        with self._monkeypatch.context() as patch:
            for name, value in {"CONFIG": "tiny.yaml", "HF_HUB_OFFLINE": "1", **variables}.items():
                patch.setenv(name, value)
            code = run(["data-check", *words])
        out, err = self._capsys.readouterr()
        return Done(code, out, err)


@pytest.fixture
def check(place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(place, monkeypatch, capsys)


def append(file: Path, *lines: str) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def first_rows(file: Path, count: int) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()[:count]


def test_good_rows_are_shown_and_prepared_for_training(place: Workplace, check: Check) -> None:
    done = check()
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "  read                              20             4" in lines
    assert "    messages                        20             4" in lines
    assert "  end of turn learned           100.0%        100.0%" in lines
    assert "3 of the rows of train; what is learned is in [[ ]]" in lines
    assert "    [[After 0 comes 1.<|im_end|>]]\\n" in lines
    assert "    [[After 19 comes 20.<|im_end|>]]\\n" in lines
    assert "\x1b" not in done.out
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("fine: ")

    config = Config.model_validate(place.config)
    assert prepare(config, place.model, place.path / "runs/.cache/tokens", lambda _: None).hit


def test_every_bad_row_is_listed_and_nothing_is_prepared(place: Workplace, check: Check) -> None:
    append(place.path / "train.jsonl", *BAD, *first_rows(place.path / "train.jsonl", 2))
    append(place.path / "validation.jsonl", first_rows(place.path / "train.jsonl", 1)[0])
    done = check()
    assert done.code == 2
    assert done.error_lines == ["error: data: 2 bad rows of 29 -> mend them, or DATA_ON_BAD_ROW=skip leaves them out"]
    lines = done.out.splitlines()
    at = lines.index("bad rows: 2, and a training refuses them (data.on_bad_row: error)")
    assert lines[at + 1].startswith("  train.jsonl:21  not JSON: ")
    assert lines[at + 2] == f"      {BAD[0]}"
    assert lines[at + 3] == "  train.jsonl:22  messages[0].content: text expected, found null"
    assert "  train.jsonl:23 says the same as train.jsonl:1" in lines
    assert "  train.jsonl:24 says the same as train.jsonl:2" in lines
    assert "  validation.jsonl:5 says the same as train.jsonl:1" in lines
    assert not (place.path / "runs").exists()


def test_a_limit_bounds_the_list_and_says_so(place: Workplace, check: Check) -> None:
    append(place.path / "train.jsonl", *[BAD[1]] * 30)
    done = check(ARGS="--limit 7")
    assert done.code == 2
    assert done.out.count("text expected, found null") == 7
    assert "  and 23 more; ARGS='--limit 30' lists them all" in done.out.splitlines()


def test_skipped_rows_are_listed_too_and_it_is_fine(place: Workplace, check: Check) -> None:
    append(place.path / "train.jsonl", *BAD)
    done = check(DATA_ON_BAD_ROW="skip")
    assert done.code == 0, done.err
    assert "bad rows: 2, and they are left out (data.on_bad_row: skip)" in done.out.splitlines()
    assert "train.jsonl:21" in done.out
    assert "careful" in done.out


def test_a_model_that_cannot_be_had_leaves_the_rows_checked(place: Workplace) -> None:
    done = place.run("data-check", CONFIG="tiny.yaml", MODEL_NAME="nobody/nothing")
    assert done.code == 4
    assert "  read                              20             4" in done.out.splitlines()
    assert "tokens" not in done.out
    assert len(done.error_lines) == 1
    assert "nobody/nothing" in done.error_lines[0]


def test_rows_beyond_the_models_positions_are_refused(place: Workplace, check: Check) -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 600,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 20,
    }  # fmt: skip
    (place.model / "config.json").write_text(json.dumps(config))
    done = check()
    assert done.code == 2
    assert "the model 20 positions" in done.error_lines[0]


def test_json_is_one_object_also_when_it_is_refused(place: Workplace, check: Check) -> None:
    done = check("--json")
    report = json.loads(done.out)
    assert report["refused"] == []
    assert report["rows"]["splits"]["train"]["formats"] == {"messages": 20}
    assert report["tokens"]["facts"]["splits"]["train"]["rows_kept"] == 20
    assert report["tokens"]["would_pack"]["packs"] > 1
    pieces = report["tokens"]["examples"][0]["pieces"]
    assert [piece["text"] for piece in pieces if piece["learned"]] == ["After 0 comes 1.<|im_end|>"]

    append(place.path / "train.jsonl", BAD[1])
    done = check("--json")
    report = json.loads(done.out)
    assert done.code == 2
    assert [f"error: {line}" for line in report["refused"]] == done.error_lines
    assert report["tokens"] is None
    assert report["rows"]["bad_rows"] == [
        {
            "shown": "train.jsonl", "line": 21, "field": "messages[0].content",
            "reason": "text expected, found null", "beginning": BAD[1],
        }
    ]  # fmt: skip


def test_of_streamed_rows_the_first_are_looked_at(place: Workplace, check: Check) -> None:
    place.write(data={"streaming": True}, train={"max_steps": 4})
    done = check()
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "  read                              20             4" in lines
    assert "  train is streamed: its figures are those of the first 20 rows" in lines
    assert "[[" in done.out
    assert lines[-1].startswith("fine: rows are tokenised while training")


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_only_on_a_terminal_that_wants_it(place: Workplace, variables: dict[str, str], coloured: bool) -> None:
    main, side = pty.openpty()
    environ = place.environ(CONFIG="tiny.yaml", **{"TERM": "xterm", **variables})
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", "data-check"], cwd=place.path, env=environ, stdout=side
    )
    os.close(side)
    shown = b""
    while True:
        try:
            block = os.read(main, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        shown += block
    os.close(main)
    assert process.wait() == 0
    text = shown.decode()
    assert ("\x1b[1;32mAfter 0 comes 1.<|im_end|>\x1b[0m\\n" in text) is coloured
    assert ("[[After 0 comes 1.<|im_end|>]]\\n" in text) is not coloured


def test_neither_torch_nor_transformers_is_loaded(place: Workplace) -> None:
    heavy = ["torch", "transformers", "accelerate", "peft", "trl", "datasets"]
    code = (
        "import sys; from sft_play.cli.app import run; code = run(['data-check']);"
        f"print('loaded:', *[name for name in {heavy!r} if name in sys.modules]); sys.exit(code)"
    )
    environ = place.environ(CONFIG="tiny.yaml")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place.path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_run_keeps_the_report(place: Workplace) -> None:
    values: dict[str, Any] = yaml.safe_load((place.path / "tiny.yaml").read_text())
    values["data"] = {"train": str(place.path / "train.jsonl"), "split": {"validation": 0.2}}
    config = Config.model_validate(values)
    run = RunDir(place.path / "runs" / "tiny")
    run.create()
    report_data(run, config, prepare(config, place.model, place.path / "cache", lambda _: None), place.model)
    text = (run.path / "data" / "report.txt").read_text()
    assert "  rows read                         16             4" in text.splitlines()
    assert "<|im_start|>assistant\\n\n    [[After " in text
    report = json.loads((run.path / "data" / "report.json").read_text())
    assert report["tokens"]["facts"]["splits"]["validation"]["rows_kept"] == 4
    assert report["origins"] == []


def test_a_run_keeps_the_commit_of_the_hub_that_it_read(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, repository = "0123456789" * 4, place.path / "datasets--owner--name"
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(place.path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    shutil.copy(place.path / "train.jsonl", repository / "snapshots" / commit)
    values: dict[str, Any] = yaml.safe_load((place.path / "tiny.yaml").read_text())
    values["data"] = {"train": [{"path": "owner/name", "revision": "v1"}]}
    config = Config.model_validate(values)
    run = RunDir(place.path / "runs" / "tiny")
    run.create()
    report_data(run, config, prepare(config, place.model, place.path / "cache", lambda _: None), place.model)
    assert json.loads((run.path / "data" / "report.json").read_text())["origins"] == [f"owner/name@{commit}"]
    assert (run.path / "data" / "report.txt").read_text().startswith(f"read from owner/name@{commit}\n")


def test_a_training_writes_the_report_before_it_plans() -> None:
    source = (ROOT / "sft_play/cli/train.py").read_text()
    assert (
        source.index("prepared = prepare_data(") < source.index("report_data(run,") < source.index("plan = make_plan(")
    )


def test_of_a_hub_id_no_weights_are_fetched(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(check.model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    done = check(MODEL_NAME="someone/model")
    assert done.code == 0, done.err
    assert asked == [("someone/model", ["*.json", "*.jinja"])]
