"""`make plan` as a program: fast, without torch, the same choice as training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROOT, Done, Workplace, assert_answers_in

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MACHINES = ["cpu", "1xT4", "2xRTX4090", "2xH100-80", "4xH200", "2x8xA100-80"]


def plan(*words: str, **variables: str) -> Done:
    environ = {"PATH": "/usr/bin:/bin", "CONFIG": "configs/demo.yaml", "MODEL_NAME": MODEL, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "sft_play", "plan", *words], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    return Done(done.returncode, done.stdout, done.stderr)


def as_json(**variables: str) -> dict[str, Any]:
    done = plan("--json", **variables)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_plan_answers_in_half_a_second_and_loads_no_torch() -> None:
    code = (
        "import sys; from sft_play.cli.app import run; code = run(['plan']);"
        "heavy = [n for n in ('torch', 'transformers', 'numpy', 'datasets') if n in sys.modules];"
        "print(*heavy, file=sys.stderr); sys.exit(code)"
    )
    environ = {
        "PATH": "/usr/bin:/bin", "CONFIG": "configs/demo.yaml", "HARDWARE": "2x8xA100-80",
        "MODEL_NAME": "meta-llama/Meta-Llama-3-70B",
    }  # fmt: skip

    def run() -> None:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stderr.strip()) == (0, "")

    assert_answers_in(0.5, run)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_components_add_up_and_one_strategy_is_chosen(machine: str) -> None:
    report = as_json(HARDWARE=machine, MODEL_NAME="Qwen/Qwen3-8B", TUNING_MODE="qlora")
    assert report["version"] == 1
    assert [one["strategy"] for one in report["strategies"] if one["chosen"]] == [report["plan"]["strategy"]]
    for one in report["strategies"]:
        phases = [sum(terms.values()) for terms in one["phases"].values()]
        assert abs(max(phases) - one["allocated_bytes"]) <= len(phases) * 20
        assert one["allocated_bytes"] <= one["needed_bytes"]
    names = {one["strategy"] for one in report["strategies"]} | {name.split(" ")[0] for name in report["not_possible"]}
    assert names == {"single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "layer_split"}


def test_the_text_shows_what_the_json_holds() -> None:
    variables = {"HARDWARE": "2xH100-80", "MODEL_NAME": "meta-llama/Meta-Llama-3-8B", "MODEL_MAX_SEQ_LEN": "4096"}
    report, text = as_json(**variables), plan(**variables).out
    (chosen,) = [one for one in report["strategies"] if one["chosen"]]
    assert re.search(rf"^> +{chosen['strategy']} +{chosen['needed_bytes'] / 2**30:.1f} ", text, re.M)
    for reason in report["plan"]["reasons"]:
        assert reason in text
    for one in report["scaling"]:
        assert f"{one['tokens_per_second']:,.0f} tokens/s" in text
    assert "H100-80" in text
    assert max(len(line) for line in text.splitlines()) < 160


def test_a_forced_strategy_that_cannot_fit_ends_2_with_the_way_out() -> None:
    done = plan(HARDWARE="2xA100-80", MODEL_NAME="meta-llama/Meta-Llama-3-8B", DIST_STRATEGY="ddp", TUNING_MODE="full",
                CONFIG="tests/cli/full.yaml")  # fmt: skip
    assert done.code == 2
    assert len(done.error_lines) == 1
    assert re.search(r"ddp does not fit .* needs \d+\.\d GiB a GPU .* -> DIST_STRATEGY=auto fits", done.error_lines[0])


def test_warnings_name_the_key_to_change() -> None:
    done = plan(HARDWARE="1xA100-80", TRAIN_LEARNING_RATE="0.1")
    assert "warning: train.learning_rate 0.1 is high for lora at 8 rows a step" in done.out
    done = plan(HARDWARE="2xRTX4090", MODEL_NAME="meta-llama/Meta-Llama-3-8B", DIST_STRATEGY="fsdp")
    assert "no NVLink" in done.out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HARDWARE": "2xH100-90"}, "HARDWARE"),
        ({"HARDWARE": "2xRTX4900"}, "RTX"),
        ({"MODEL_NAME": "owner/unheard-of"}, "not in the catalog"),
        ({"CONFIG": ""}, "CONFIG is missing"),
    ],
)
def test_mistakes_are_one_line(variables: dict[str, str], said: str) -> None:
    done = plan(**variables)
    assert done.code == 2
    assert len(done.error_lines) == 1
    assert said in done.error_lines[0]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DATA_TRAIN": "absent.jsonl"}, "data.train: no such file or folder: absent.jsonl"),
        ({"DATA_VALIDATION": "absent/*.jsonl"}, "data.validation: no file matches absent/*.jsonl"),
        ({"DATA_TEST": "LICENSE"}, "data.test: LICENSE is of no readable type"),
        ({"DATA_TRAIN": "no.jsonl", "DATA_TEST": "none.jsonl"}, "data.test: no such file or folder: none.jsonl"),
    ],
)
def test_data_that_are_not_there_end_it_as_they_end_a_training(
    workplace: Workplace, variables: dict[str, str], said: str
) -> None:
    (workplace.path / "LICENSE").touch()
    planned, checked = (workplace.run(command, CONFIG="tiny.yaml", **variables) for command in ("plan", "data-check"))
    assert (planned.code, planned.out) == (checked.code, "") == (2, "")
    assert said in planned.error_lines[-1]
    assert planned.error_lines == checked.error_lines
    elsewhere = workplace.run("plan", CONFIG="tiny.yaml", HARDWARE="1xT4", **variables)
    assert elsewhere.code == 0, elsewhere.err
    assert f"warning: {said}" in elsewhere.out


def test_a_hub_data_set_is_neither_fetched_nor_asked_for(workplace: Workplace) -> None:
    given = {"CONFIG": "tiny.yaml", "DATA_TRAIN": "owner/name", "HF_HOME": str(workplace.path)}
    said = "warning: data.train: owner/name is no file or folder here; a run fetches it from the hub"
    done = workplace.run("plan", **given)
    assert done.code == 0, done.err
    assert said in done.out
    (workplace.path / "hub/datasets--owner--name/snapshots/0123").mkdir(parents=True)
    assert said not in workplace.run("plan", **given).out


def test_training_follows_the_plan_and_knows_the_data_afterwards(workplace: Workplace) -> None:
    def planned() -> dict[str, Any]:
        return json.loads(workplace.run("plan", "--json", CONFIG="tiny.yaml").out)

    before = planned()
    assert before["plan"]["seq_len"] == 128
    assert workplace.train().code == 0
    after = planned()
    ran = json.loads((workplace.path / "runs/tiny/run.json").read_text())["plan"]
    assert after["plan"] == ran
    assert after["plan"]["seq_len"] < 128
    assert after["run"]["rows"] == 32
    assert after["run"]["steps"] == 4


def test_calibration_runs_real_steps_and_later_plans_show_the_figure(workplace: Workplace) -> None:
    done = workplace.run("plan", CONFIG="tiny.yaml", CALIBRATE="1")
    assert done.code == 0, done.err
    assert "calibrating: 4 steps of 4 x 63 tokens" in done.out
    assert "step 4/4" in done.out
    last = done.out.splitlines()[-1]
    assert re.search(r"memory 0\.\d\d GiB measured, 0\.\d\d planned; [\d,]+ tokens/s", last), last
    assert not (workplace.path / "runs/tiny").exists()
    again = workplace.run("plan", CONFIG="tiny.yaml")
    assert f"measured on this machine\n  {last}" in again.out
    refused = workplace.run("plan", CONFIG="tiny.yaml", CALIBRATE="1", HARDWARE="1xT4")
    assert refused.code == 2
    assert "CALIBRATE" in refused.error_lines[0]


def test_a_finished_run_keeps_its_figure(workplace: Workplace) -> None:
    assert workplace.train().code == 0
    (line,) = (workplace.path / "runs/.cache/measured.jsonl").read_text().splitlines()
    kept, record = json.loads(line), workplace.record()
    assert kept["memory_bytes"] == record["measured"]["memory_bytes"] > 0
    assert kept["predicted_memory_bytes"] == record["predicted"]["allocated_bytes"]
    assert kept["tokens_per_second"] == record["tokens_per_second"]


@pytest.mark.parametrize(
    ("machine", "variables", "command", "launcher"),
    [
        ("1xH100-80", {}, "make train CONFIG=", "sft_play.runtime.worker runs/"),
        ("2xH100-80", {"DIST_STRATEGY": "ddp"}, "make train-distributed CONFIG=", "accelerate.commands.launch"),
        ("2xH100-80", {"DIST_STRATEGY": "zero2"}, "make train-deepspeed CONFIG=", "accelerate.commands.launch"),
        ("2x8xH100-80", {"DIST_STRATEGY": "fsdp"}, "NUM_NODES=2 NODE_RANK=0 MAIN_ADDRESS=HOST", "--num_machines 2"),
    ],
)
def test_the_command_is_the_one_that_runs_the_plan(
    tmp_path: Path, machine: str, variables: dict[str, str], command: str, launcher: str
) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("model: {name: Qwen/Qwen3-0.6B}\ndata: {train: a.jsonl}\n")
    environ = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CONFIG": str(config), "HARDWARE": machine, **variables,
    }  # fmt: skip
    words = [sys.executable, "-m", "sft_play", "plan", "--json"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert command in told["command"]
    assert launcher in told["launcher"]
    assert all(f"{name}={value}" in told["command"] for name, value in variables.items())
