"""Runs that are stopped, damaged or asked for again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tiny import Done, Workplace

FAULT = pytest.mark.fault
LONG = {"max_steps": 12, "save_steps": 4}


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the program's output up to a line that holds `text`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never printed:\n{seen}\n{process.stderr.read() if process.stderr else ''}")


def finish(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


def adapter_bytes(workplace: Workplace, name: str) -> bytes:
    return (workplace.path / f"runs/{name}/adapter/adapter_model.safetensors").read_bytes()


@pytest.fixture
def slow(workplace: Workplace) -> Workplace:
    """Twelve steps with dropout, checkpoints at 4, 8 and 12."""
    workplace.config["tuning"] = {"mode": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    workplace.write(train={**workplace.config["train"], **LONG})
    return workplace


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 75, "stopped"), pytest.param(signal.SIGINT, 130, "stopped", marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_weights(
    slow: Workplace, number: signal.Signals, code: int, word: str
) -> None:
    assert slow.train(RUN_NAME="straight").code == 0
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "step  5/12")
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == code, stopped.err
    assert len(stopped.error_lines) == 1
    assert word in stopped.error_lines[0]
    resumed = slow.train()
    assert resumed.code == 0, resumed.err
    assert "resuming from" in resumed.out
    assert adapter_bytes(slow, "tiny") == adapter_bytes(slow, "straight")
    assert slow.losses("tiny") == slow.losses("straight")


def test_kill_9_of_the_worker_is_told_and_resumed_to_the_bit(slow: Workplace) -> None:
    assert slow.train(RUN_NAME="straight").code == 0
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "saved checkpoints/step-4")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    died = finish(process)
    assert died.code == 6
    assert "SIGKILL" in died.error_lines[0]
    assert slow.train().code == 0
    assert adapter_bytes(slow, "tiny") == adapter_bytes(slow, "straight")


def test_kill_9_of_the_parent_leaves_no_worker(slow: Workplace) -> None:
    slow.write(train={**slow.config["train"], "max_steps": 5000})
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "step    2/5000")
    worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    process.kill()
    finish(process)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the worker outlived its parent by 10 s")
    saved = list((slow.path / "runs/tiny/checkpoints").glob("step-*/manifest.json"))
    assert len(saved) == 1, "it saved what it had before it left"
    assert json.loads((slow.path / "runs/tiny/launch/exit-0.json").read_text())["code"] == 75


@pytest.mark.slow  # test_damage.py does each kind to each file
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_taken(slow: Workplace) -> None:
    assert slow.train().code == 0
    run = slow.path / "runs/tiny"
    (run / "record.json").unlink()
    damaged = run / "checkpoints/step-12/adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    before = adapter_bytes(slow, "tiny")
    done = slow.train()
    assert done.code == 0, done.err
    assert "step-12 is set aside: adapter_model.safetensors differs from its checksum" in done.out
    assert "step-8" in done.out
    assert adapter_bytes(slow, "tiny") == before


def test_no_good_checkpoint_is_refused_every_time(slow: Workplace) -> None:
    assert slow.train().code == 0
    run = slow.path / "runs/tiny"
    (run / "record.json").unlink()
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    for _ in range(2):
        done = slow.train()
        assert done.code == 3
        assert "no checkpoint of this run is whole" in done.error_lines[0]


@pytest.mark.fault
def test_a_finished_run_says_so_and_never_starts_anew_unasked(workplace: Workplace) -> None:
    assert workplace.train().code == 0
    half = workplace.path / "runs/tiny/launch/.exit-0.json.new"
    half.touch()  # of a worker that was killed after its result was there
    again = workplace.train()
    assert again.code == 3
    assert not half.exists()
    assert "finished" in again.error_lines[0]
    assert "RUN_RESUME=never" in again.error_lines[0]
    anew = workplace.train(RUN_RESUME="never")
    assert anew.code == 0
    assert (workplace.path / "runs/tiny/earlier-1/adapter").is_dir()


def test_another_config_may_not_continue_a_run(slow: Workplace) -> None:
    assert slow.train().code == 0
    (slow.path / "runs/tiny/record.json").unlink()
    done = slow.train(TRAIN_LEARNING_RATE="0.5")
    assert done.code == 3
    assert "of another run: train.learning_rate" in done.error_lines[0]
    assert done.error_lines[2].split() == ["error:", "train.learning_rate", "0.01", "0.5"]


@FAULT
@pytest.mark.fault
def test_without_a_name_a_changed_learning_rate_is_another_run(workplace: Workplace) -> None:
    workplace.config["run"] = {}
    workplace.write()
    for rate in ("0.01", "0.02"):
        assert workplace.train(TRAIN_LEARNING_RATE=rate).code == 0
    assert len([folder for folder in (workplace.path / "runs").iterdir() if folder.name.startswith("tiny-")]) == 2


def test_two_runs_in_one_folder(slow: Workplace) -> None:
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "loading")
    second = slow.train()
    assert second.code == 4
    assert f"process {process.pid} works here" in second.error_lines[0]
    assert finish(process).code == 0


def test_a_loss_that_is_not_finite_stops_before_the_step(workplace: Workplace) -> None:
    workplace.config["tuning"] = {"mode": "full"}
    workplace.write(train={**workplace.config["train"], "learning_rate": 1e30, "max_grad_norm": 0, "save_steps": 1})
    done = workplace.train()
    assert done.code == 5
    assert len(done.error_lines) == 1
    assert "step 2" in done.error_lines[0]
    assert "Traceback" not in done.err + done.out
    assert json.loads((workplace.path / "runs/tiny/record.json").read_text())["outcome"] == "LossNotFiniteError"


def test_a_full_disk_while_saving_is_named_and_leaves_no_half_checkpoint(workplace: Workplace) -> None:
    limited = ["bash", "-c", "ulimit -f 20; exec python -m sft_play train"]
    environ = workplace.environ(CONFIG="tiny.yaml", DATA_MAX_ROWS="8")
    environ["PATH"] = f"{Path(os.sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(limited, cwd=workplace.path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "disk is full" in done.stderr
    assert not list((workplace.path / "runs/tiny/checkpoints").glob("step-*"))


@FAULT
@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_its_end_only_finishes(slow: Workplace) -> None:
    """Killed between the last save and the result: not one step more is trained."""
    assert slow.train().code == 0
    run = slow.path / "runs/tiny"
    before, losses = adapter_bytes(slow, "tiny"), slow.losses()
    (run / "record.json").unlink()
    shutil.rmtree(run / "adapter")
    done = slow.train()
    assert done.code == 0, done.err
    assert "training ended at step 12" in done.out
    assert slow.record()["steps"] == 12
    assert adapter_bytes(slow, "tiny") == before
    assert slow.losses() == losses


def test_other_data_is_refused(slow: Workplace) -> None:
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "saved checkpoints/step-4")
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    rows = (slow.path / "train.jsonl").read_text().splitlines()
    (slow.path / "train.jsonl").write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    done = slow.train()
    assert done.code == 3
    assert "of another run: data_fingerprint" in done.error_lines[0]


@pytest.mark.fault
def test_the_metrics_of_a_resumed_run_hold_every_step_once(slow: Workplace) -> None:
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "step  7/12")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert finish(process).code == 6
    assert slow.train().code == 0
    lines = (slow.path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if one["event"] == "train"] == list(range(1, 13))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_while_the_worker_is_still_importing(slow: Workplace, number: signal.Signals, code: int) -> None:
    process = slow.start("train", CONFIG="tiny.yaml")
    wait_for(process, "attention sdpa")  # the last line before the worker starts
    time.sleep(0.7)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == code, stopped.out + stopped.err
    assert "Traceback" not in stopped.out + stopped.err
    assert slow.train().code == 0


def test_a_generation_config_that_contradicts_itself_is_repaired_before_training(
    workplace: Workplace, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workplace.model, copy)
    (copy / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9, "eos_token_id": 0}')
    done = workplace.train(MODEL_NAME=str(copy))
    assert done.code == 0, done.err
    assert "do_sample" in done.out
    assert json.loads((workplace.path / "runs/tiny/adapter/generation_config.json").read_text())["do_sample"] is True


def test_the_best_model_is_that_of_the_evaluation_loss_where_no_metric_is_named(workplace: Workplace) -> None:
    workplace.write(
        train={
            **workplace.config["train"],
            "max_steps": 6, "learning_rate": 4.0, "warmup": 8, "eval_strategy": "steps", "eval_steps": 1,
            "save_steps": 1, "load_best_model_at_end": True,
        }
    )  # fmt: skip
    assert workplace.train().code == 0
    assert workplace.record()["best_step"] < 6
