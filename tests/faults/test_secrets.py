"""Tokens of the environment and passwords in URLs: nothing that is said or kept holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.config.secrets import redacted
from tests.faults.hooks import hooked
from tests.tiny import Done, Workplace

HUB, TRACKER, PASSWORD = "canary-hub-7f3a91", "canary-wandb-2b88c0", "canary-password-55d1"
CANARIES = (HUB, TRACKER, PASSWORD)
ENVIRON = {
    "HF_TOKEN": HUB,
    "WANDB_API_KEY": TRACKER,
    "HTTPS_PROXY": f"https://someone:{PASSWORD}@proxy.example:3128",
    "HF_ENDPOINT": f"https://someone:{PASSWORD}@hub.example",
}
RAISES = """
import os, sys

def patch(module):
    def training_step(self, *items, **named):
        print("said", os.environ["HF_TOKEN"], os.environ["HTTPS_PROXY"])
        os.write(2, f"native {os.environ['WANDB_API_KEY']}\\n".encode())
        raise ValueError(f"refused: {os.environ['HF_TOKEN']} by {os.environ['HTTPS_PROXY']}")
    module.SFTTrainer.training_step = training_step
"""


def leaks(workplace: Workplace, *runs: Done) -> list[str]:
    """Where a canary was found: a command's output, or a file below the folder of runs."""
    found = [text for done in runs for text in (done.out, done.err) if any(one in text for one in CANARIES)]
    for file in (workplace.path / "runs").rglob("*"):
        if file.is_file() and any(one.encode() in file.read_bytes() for one in CANARIES):
            found.append(str(file))
    return found


def test_a_whole_run_keeps_none(workplace: Workplace) -> None:
    done = workplace.train(**ENVIRON)
    assert done.code == 0, done.err
    assert not leaks(workplace, done)


@pytest.mark.fault
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_fails_with_one_in_its_message_keeps_none(workplace: Workplace, ranks: int) -> None:
    hook = hooked(workplace.path / "hook", "sft_play.runtime.trainer", RAISES)
    given = {"CONFIG": "tiny.yaml", "NUM_GPUS": str(ranks), "TRAIN_BATCH_SIZE": "2"}
    done = workplace.run("train-distributed", **given, **hook, **ENVIRON)
    assert done.code == 6, done.out + done.err
    assert "ValueError: refused: *** by https://***@proxy.example:3128" in done.error_lines[0]
    log = (workplace.path / "runs/tiny/run.log").read_text()
    assert "Traceback" in log
    assert "native ***" in log
    assert "said *** https://***@proxy.example:3128" in log
    assert not leaks(workplace, done)


@pytest.mark.parametrize("command", ["plan", "data-check", pytest.param("doctor", marks=pytest.mark.slow), "config"])
def test_commands_that_only_look_say_none(workplace: Workplace, command: str) -> None:
    plain = workplace.run(command, CONFIG="tiny.yaml", **ENVIRON)
    found = leaks(workplace, plain, workplace.run(command, CONFIG="tiny.yaml", ARGS="--json", **ENVIRON))
    assert not found
    assert plain.out


@pytest.mark.parametrize("key", ["model.name", "data.train", "run.name", "run.output_dir"])
def test_a_url_with_a_password_in_the_config_is_refused_unquoted(workplace: Workplace, key: str) -> None:
    section, name = key.split(".")
    workplace.write(**{section: {name: f"https://someone:{PASSWORD}@hub.example/data"}})
    for done in (workplace.train(), workplace.run("config", CONFIG="tiny.yaml"), workplace.train(ARGS="--debug")):
        assert done.code == 2
        assert f"{key} looks like a token or a URL with a password" in done.err
        assert not leaks(workplace, done)


def test_what_is_taken_out() -> None:
    environ = {"HF_TOKEN": "abcdefgh", "MY_PASSWORD": "no", "PROXY": "http://me:s3cr3tword@host", "LANG": "C.UTF-8"}
    assert redacted("abcdefgh and s3cr3tword; no C.UTF-8", environ) == "*** and ***; no C.UTF-8"
    assert redacted("at git+https://user@host/x", {}) == "at git+https://***@host/x"
    assert redacted("https://host/a@b and mail@host", {}) == "https://host/a@b and mail@host"
    for name in ("TOKENIZERS_PARALLELISM", "TRAIN_EVAL_ROUGE_TOKENIZER", "TRAIN_GENERATION_MAX_NEW_TOKENS"):
        assert redacted("not rouge_score", {name: "rouge_score"}) == "not rouge_score"
    odd = 'pa"ss\\wörd'
    assert redacted(json.dumps({"said": f"it is {odd}"}), {"DB_PASSWORD": odd}) == '{"said": "it is ***"}'


def test_the_check_sees_a_file(workplace: Workplace) -> None:
    file = workplace.path / "runs/deep/file.bin"
    file.parent.mkdir(parents=True)
    Path(file).write_bytes(b"\0" + PASSWORD.encode())
    assert leaks(workplace) == [str(file)]
