"""`tuning.backend: unsloth` from the commands: refused in one line where it cannot be, and never bnb instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sft_play.cli.run_start import check_backend
from sft_play.config.resolve import resolve
from sft_play.errors import EnvironmentProblem
from sft_play.facts.backends import FOLDER
from sft_play.facts.probe import probe_hardware
from sft_play.record.manifest import NAME, read_manifest
from tests.cli.fake_gpus import TwoGpus, install
from tests.tiny import ROOT, Workplace

HERE = {"TUNING_BACKEND": "unsloth", "MODEL_DTYPE": "auto"}


@pytest.mark.parametrize("command", ["train", "train-distributed", "plan"])
def test_without_a_gpu_it_is_one_line_and_nothing_is_written(workplace: Workplace, command: str) -> None:
    done = workplace.run(command, CONFIG="tiny.yaml", **HERE)
    assert (done.code, done.error_lines) == (
        4,
        [
            "error: tuning.backend: unsloth needs a CUDA GPU and none is seen -> train where one is, or set"
            " TUNING_BACKEND=bnb"
        ],
    )
    assert "Traceback" not in done.err
    assert not list(workplace.path.glob("runs/tiny/run.json"))


def test_no_model_is_fetched_for_a_machine_that_cannot_train_it(workplace: Workplace) -> None:
    """Offline a model that is not here would be the first thing that is missed."""
    done = workplace.run("train", CONFIG="tiny.yaml", MODEL_NAME="owner/large", **HERE)
    assert (done.code, "needs a CUDA GPU" in done.error_lines[0]) == (4, True), done.err
    assert not list(workplace.path.glob("runs/*"))


def test_what_it_does_not_offer_is_refused_with_the_reason(workplace: Workplace) -> None:
    done = workplace.run("train-distributed", CONFIG="tiny.yaml", DIST_STRATEGY="fsdp", **HERE)
    assert done.code == 2
    assert "one GPU, or DDP with a copy on each" in done.error_lines[0]
    zero = workplace.run("train-deepspeed", CONFIG="tiny.yaml", **HERE)
    assert zero.code == 2
    assert "which this command does not offer" in zero.error_lines[0]


def test_without_its_environment_the_installer_is_named(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, TwoGpus())
    monkeypatch.setenv(FOLDER, str(tmp_path / "nothing"))
    config = resolve(workplace.path / "tiny.yaml", HERE).config
    with pytest.raises(EnvironmentProblem) as caught:
        check_backend(config, probe_hardware(environment={}))
    assert caught.value.line() == (
        "tuning.backend: unsloth's environment is not installed (nothing) -> make install-unsloth"
    )
    (tmp_path / "nothing/bin").mkdir(parents=True)
    (tmp_path / "nothing/bin/python").touch()
    (tmp_path / "nothing/installed").touch()
    check_backend(config, probe_hardware(environment={}))


def test_a_checkpoint_of_one_backend_is_refused_by_the_other(workplace: Workplace) -> None:
    """Before the missing GPU is: no machine could go on with it."""
    short = {**workplace.config["train"], "max_steps": 2, "save_steps": 2, "eval_strategy": "no"}
    workplace.write(train=short)
    assert workplace.train().code == 0
    run = workplace.path / "runs/tiny"
    (run / "record.json").unlink()
    refused = workplace.train(**HERE)
    assert refused.code == 3, refused.err
    assert "checkpoint step-2 is of another run: backend" in refused.error_lines[0]
    assert [line.split() for line in refused.error_lines[1:]] == [
        ["error:", "made", "by", "this", "run"], ["error:", "backend", "bnb", "unsloth"],
    ]  # fmt: skip
    anew = workplace.train(RUN_RESUME="never", **HERE)
    assert (anew.code, "needs a CUDA GPU" in anew.error_lines[0]) == (4, True)

    folder = run / "checkpoints/step-2"
    manifest = read_manifest(folder)
    manifest["stamp"]["backend"] = "unsloth"
    (folder / NAME).write_text(json.dumps(manifest))
    back = workplace.train()
    assert back.code == 3, back.err
    assert ["error:", "backend", "unsloth", "bnb"] in [line.split() for line in back.error_lines]


@pytest.mark.slow
def test_its_result_is_an_adapter_that_the_plain_stack_loads(workplace: Workplace) -> None:
    """What follows training needs neither unsloth nor its environment."""
    workplace.write(train={**workplace.config["train"], "max_steps": 1, "eval_strategy": "no", "save_strategy": "no"})
    assert workplace.train().code == 0
    told = workplace.path / "runs/tiny/run.json"
    job = json.loads(told.read_text())
    job["config"]["tuning"]["backend"] = job["stamp"]["backend"] = "unsloth"
    told.write_text(json.dumps(job))
    done = workplace.run("infer", RUN="runs/tiny", ARGS="--prompt hello --max-new-tokens 4")
    assert done.code == 0, done.err


def test_the_plan_of_its_page_and_its_preset(workplace: Workplace) -> None:
    page = (ROOT / "docs/unsloth.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`make plan (CONFIG=\S+) (HARDWARE=\S+)`", page)
    config, hardware = (word.partition("=")[2] for word in line)
    done = workplace.run("plan", CONFIG=str(ROOT / config), HARDWARE=hardware)
    assert done.code == 0, done.err
    assert "kernels unsloth" in done.out
    assert "sft_play.runtime.unsloth_worker" in done.out
