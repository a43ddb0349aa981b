"""The Makefile takes every variable to the letter and hands it on through the environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.tiny import ROOT, assert_answers_in

# One file a test worker: two that share one would remove each other's evidence.
CANARY = f"PWNED-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
HOSTILE = [
    "x; touch PWNED",
    "`touch PWNED`",
    "$(shell touch PWNED)",
    "$$(touch PWNED)",
    "$(touch PWNED)",
    '"; touch PWNED; "',
    "' ; touch PWNED ; '",
    "| touch PWNED",
    "\n\ttouch PWNED",
]


def make(*words: str, code: int | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=ROOT,
        env={**base, **environ},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if code is not None:
        assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(autouse=True)
def _canary():
    canary = ROOT / CANARY
    canary.unlink(missing_ok=True)
    yield
    existed = canary.exists()
    canary.unlink(missing_ok=True)
    assert not existed, "the value of a variable was run"


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("name", ["CONFIG", "TRAIN_RUN", "ARGS", "RUN", "PYTHON", "READY", "SFT_PLAY"])
def test_a_value_is_never_run(name: str, value: str) -> None:
    target = "infer" if name == "RUN" else "config"
    done = make(target, f"{name}={value.replace('PWNED', CANARY)}")
    assert "Traceback" not in done.stderr + done.stdout


def test_a_hostile_value_in_the_environment_is_never_run() -> None:
    for value in HOSTILE[:5]:
        make("config", CONFIG=value.replace("PWNED", CANARY), code=2)


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    done = make("config", "CONFIG=configs/demo.yaml", "TRAIN_BATCHSIZE=1", code=2)
    assert "TRAIN_BATCHSIZE" in done.stderr
    assert "TRAIN_BATCH_SIZE" in done.stderr


def test_overrides_are_shown_with_their_origin() -> None:
    values = {"TRAIN_BATCH_SIZE": 1, "MODEL_MAX_SEQ_LEN": 256, "TUNING_LORA_R": 4, "TRAIN_LEARNING_RATE": 1e-4}
    words = [f"{name}={value}" for name, value in values.items()]
    shown = json.loads(make("config", "CONFIG=configs/demo.yaml", "ARGS=--json", *words, code=0).stdout)
    entries = shown.get("values", shown)
    for key, value in {
        "train.batch_size": 1,
        "model.max_seq_len": 256,
        "tuning.lora.r": 4,
        "train.learning_rate": 1e-4,
    }.items():
        assert entries[key]["value"] == value
        assert key.replace(".", "_").upper() in json.dumps(entries[key]["origin"])


def test_args_keep_their_quotes() -> None:
    done = make("infer", "MODEL=./nope", "ARGS=--prompt 'two words' --file 'a b'", code=2)
    assert "--prompt and --file exclude each other" in done.stderr
    done = make("infer", "MODEL=./nope", "ARGS=--prompt 'two words", code=2)
    assert "close the quote" in done.stderr


def test_help_is_the_default_and_fast() -> None:
    assert_answers_in(0.5, lambda: make(code=0))
    done = make(code=0)
    for target in ("demo", "train", "infer", "test"):
        assert f"make {target}" in done.stdout


def test_config_through_make_answers_in_half_a_second() -> None:
    assert_answers_in(0.5, lambda: make("config", "CONFIG=configs/demo.yaml", code=0))


def test_an_old_make_gets_a_clear_word(tmp_path: Path) -> None:
    done = make("help", "MAKE_VERSION=3.81")
    assert done.returncode == 2
    assert "3.81 is too old" in done.stderr
