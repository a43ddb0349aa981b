"""wandb, trackio and mlflow through transformers' callbacks: what they lack is told before anything is loaded."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli import trackers
from sft_play.cli.trackers import check_trackers
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentProblem, ExitCode
from tests.tiny import Workplace


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


CANARY = "canary-tracker-81d2e6"


@pytest.fixture
def beside_a_secret(workplace: Workplace) -> Workplace:
    """A run in a git checkout with a token in its remote's URL; a secret is a part of the model's path."""
    shutil.copytree(workplace.model, workplace.path / CANARY / "model")
    workplace.config["model"]["name"] = f"{CANARY}/model"
    subprocess.run(["git", "init", "-q"], cwd=workplace.path, check=True)
    remote = f"https://{CANARY}@hub.example/x.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=workplace.path, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "a"], cwd=workplace.path, check=True)
    return workplace


def traces(folder: Path) -> list[str]:
    """The files below a folder that hold the secret."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [str(file) for file in files if CANARY.encode() in file.read_bytes()]


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


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("tracker", "name", "values", "neutral"),
    [
        ("wandb", "WANDB_LOG_MODEL", ("checkpoint", "end", "true"), ("", "false")),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", ("1", "TRUE"), ("0", "False", "")),
    ],
)
def test_weights_go_to_no_tracker(tracker: str, name: str, values: tuple[str, ...], neutral: tuple[str, ...]) -> None:
    """The trackers' callbacks look for them in folders named checkpoint-N, and would end the run at its first save."""
    for value in values:
        with pytest.raises(EnvironmentProblem) as caught:
            check_trackers(config(tracker), {name: value, "WANDB_MODE": "offline"})
        assert f"{name}={value}: trackers are sent figures here, no weights -> unset it" in caught.value.line()
    for value in neutral:
        check_trackers(config(tracker), {name: value, "WANDB_MODE": "offline"})
    check_trackers(config("trackio"), {name: values[0]})


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


@pytest.mark.parametrize("tracker", [pytest.param(one, marks=installed(one)) for one in ("wandb", "trackio", "mlflow")])
def test_a_tracker_is_told_no_secret(tracker: str, beside_a_secret: Workplace, tmp_path: Path) -> None:
    beside_a_secret.write(run={"report_to": [tracker]})
    kept = tmp_path / "kept"
    kept.mkdir()
    place = {"WANDB_MODE": "offline", "WANDB_DIR": str(kept), "TRACKIO_DIR": str(kept)}
    place["MLFLOW_TRACKING_URI"] = f"sqlite:///{kept}/mlflow.db"
    done = beside_a_secret.train(MY_API_KEY=CANARY, **place)
    assert done.code == 0, done.err
    assert not traces(kept)


def test_what_a_tracker_is_told_is_plain_and_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model
    from torch.nn import Module
    from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

    from sft_play.runtime.trackers import WithoutSecrets
    from tests.tiny import make_model

    told: dict[str, Any] = {}

    class Tracker(TrainerCallback):
        def setup(self, args: Any, state: Any, model: Any) -> None:
            told.update(args=args.to_dict(), name=args.run_name, rate=args.learning_rate, size=model.num_parameters())
            told.update(model=model.config.to_dict(), adapter=model.peft_config, watched=isinstance(model, Module))

    class Told(WithoutSecrets, Tracker):  # type: ignore[misc]
        pass

    monkeypatch.setenv("MY_API_KEY", CANARY)
    base = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / CANARY))
    model = get_peft_model(base, LoraConfig(target_modules=["v_proj", "q_proj"]))
    args = TrainingArguments(output_dir=str(tmp_path / CANARY), run_name=CANARY, use_cpu=True)
    Told().setup(args, None, model)  # type: ignore[arg-type]
    assert told["watched"]
    assert (told["name"], told["rate"], told["size"]) == ("***", args.learning_rate, model.num_parameters())
    assert told["args"]["output_dir"] == str(tmp_path / "***")
    assert told["model"]["hidden_size"] == 32
    assert told["adapter"]["default"]["target_modules"] == ["q_proj", "v_proj"]
    assert CANARY not in json.dumps(told)
    assert args.run_name == CANARY
    assert CANARY in model.peft_config["default"].base_model_name_or_path
