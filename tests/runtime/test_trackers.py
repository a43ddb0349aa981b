"""wandb, trackio and mlflow through transformers' callbacks: what they lack is told before anything is loaded."""

from __future__ import annotations

import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest

from sft_play.cli import trackers
from sft_play.cli.trackers import check_trackers
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentProblem, ExitCode
from tests.tiny import Workplace


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def config(*names: str, node: int = 0) -> Config:
    tree = {"model": {"name": "m"}, "data": {"train": "a"}, "run": {"report_to": names}, "dist": {"node_rank": node}}
    return Config.model_validate(tree)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_an_error_with_its_cure(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == tracker else name)
    with pytest.raises(EnvironmentProblem, match=f"{tracker} is not installed") as caught:
        check_trackers(config("tensorboard", tracker), {"WANDB_API_KEY": "k"})
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert f"{tracker}, or take it out" in caught.value.fix
    check_trackers(config("tensorboard", tracker, node=1), {})  # only machine 0 reports


@pytest.mark.usefixtures("all_installed")
def test_wandb_without_a_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="wandb has no key"):
        check_trackers(config("wandb"), {"NETRC": str(tmp_path / "none")})
    netrc = tmp_path / "netrc"
    netrc.write_text("machine elsewhere.org login user password x\n")
    with pytest.raises(EnvironmentProblem, match="wandb has no key"):
        check_trackers(config("wandb"), {"NETRC": str(netrc)})
    netrc.write_text("machine api.wandb.ai login user password x\n")
    for environ in ({"NETRC": str(netrc)}, {"WANDB_API_KEY": "x"}, {"WANDB_MODE": "offline"}):
        check_trackers(config("wandb"), environ)


@pytest.mark.usefixtures("all_installed")
def test_a_space_of_trackio_needs_a_token(tmp_path: Path) -> None:
    environ = {"TRACKIO_SPACE_ID": "me/space", "HF_HOME": str(tmp_path)}
    with pytest.raises(EnvironmentProblem, match="no token"):
        check_trackers(config("trackio"), environ)
    check_trackers(config("trackio"), {**environ, "HF_TOKEN": "x"})
    check_trackers(config("trackio"), {"HF_HOME": str(tmp_path)})


def test_the_command_refuses_before_it_loads_anything(workplace: Workplace) -> None:
    workplace.write(run={"name": "tiny", "report_to": ["wandb"]})
    done = workplace.train(NETRC="none")
    assert done.code == ExitCode.ENVIRONMENT
    assert "run.report_to: " in done.error_lines[0]
    assert not (workplace.path / "runs").exists()


@installed("wandb")
def test_wandb_keeps_the_losses_offline(workplace: Workplace) -> None:
    workplace.write(run={"name": "tiny", "report_to": ["wandb"]}, train={"save_steps": 2})
    done = workplace.train(WANDB_MODE="offline")
    assert done.code == 0, done.err
    (file,) = (workplace.path / "runs/tiny/wandb").glob("offline-run-*/*.wandb")
    kept = file.read_bytes()
    assert b"train/loss" in kept
    for loss in workplace.losses():
        assert repr(loss).encode() in kept


@installed("trackio")
def test_trackio_keeps_the_losses(workplace: Workplace) -> None:
    workplace.write(run={"name": "tiny", "report_to": ["trackio"]})
    done = workplace.train(TRACKIO_DIR=str(workplace.path / "trackio"))
    assert done.code == 0, done.err
    with sqlite3.connect(workplace.path / "trackio/sft-play.db") as kept:
        query = "select json_extract(cast(metrics as text), '$.\"train/loss\"') from metrics where run_name = 'tiny'"
        shown = [loss for (loss,) in kept.execute(query) if loss is not None]
    assert shown == pytest.approx(workplace.losses())


@installed("mlflow")
def test_mlflow_keeps_the_losses(workplace: Workplace) -> None:
    workplace.write(run={"name": "tiny", "report_to": ["mlflow"]})
    done = workplace.train()
    assert done.code == 0, done.err
    with sqlite3.connect(workplace.path / "runs/mlflow.db") as kept:
        shown = [loss for (loss,) in kept.execute("select value from metrics where key = 'loss' order by step")]
    assert shown == pytest.approx(workplace.losses())
