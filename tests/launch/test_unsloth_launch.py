"""`tuning.backend: unsloth`: what is planned, which Python trains it, with which settings, and from which pins."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.cli.install import UNSLOTH, fingerprint, unsloth_steps
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentProblem
from sft_play.facts.backends import FOLDER, python_of, unsloth_installed, versions_of
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.launch.execute import execute
from sft_play.launch.spec import WorkerInputs, launch_spec
from sft_play.plan.build import Plan, PlanInputs, make_plan
from sft_play.plan.fast import refuse_without_cuda
from sft_play.plan.select import allowed_layouts
from sft_play.record.run_dir import RunDir
from sft_play.record.stamp import Identities, make_stamp
from tests.launch.planned import make_config
from tests.launch.planned import make_plan as plan_by_hand
from tests.tiny import ROOT

# What the worker never imports, or only where the config asks for what unsloth refuses.
NOT_THERE = {"deepspeed", "lm_eval", "unsloth", "fastapi", "starlette", "uvicorn", "pygal", "mlx", "pytest"}
# Imports by the package that brings them, where the two have other names.
PACKAGES = {"ruamel": "ruamel.yaml", "docx": "python-docx", "pynvml": "nvidia-ml-py", "rouge_score": "rouge_score"}
# unsloth 2026.10.7's own bounds of what it trains with (its metadata, extra huggingfacenotorch).
BELOW = {"trl": (1, 15, 1), "transformers": (5, 17, 1), "datasets": (5,), "torch": (2, 15)}
INPUTS = WorkerInputs(model_path=Path("m"), splits={}, stamp={}, config_yaml="")


def unsloth_config(**sections: dict[str, object]) -> Config:
    return make_config(**{**sections, "tuning": {"backend": "unsloth", **sections.get("tuning", {})}})


def pins() -> dict[str, str]:
    lines = (ROOT / UNSLOTH.made_from[0]).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_pins_are_within_unsloths_bounds_and_are_exact() -> None:
    found = pins()
    for name, below in BELOW.items():
        assert tuple(map(int, re.findall(r"\d+", found[name])))[: len(below)] < below, name
    assert found["unsloth"] == found["unsloth_zoo"]
    assert not {"torchvision", "xformers"} & set(found), "built for one torch each, and stop unsloth under another"


def worker_imports() -> Iterator[str]:
    """Packages that the layers of the worker import anywhere."""
    for layer in ("config", "facts", "plan", "record", "data", "runtime"):
        for file in (ROOT / "sft_play" / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from (alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    yield (node.module or "").split(".")[0]


def test_every_import_of_the_worker_is_pinned_there() -> None:
    import sys

    wanted = set(worker_imports()) - set(sys.stdlib_module_names) - NOT_THERE - {"sft_play"}
    pinned = {name.lower().replace("-", "_") for name in pins()}
    lacking = [name for name in wanted if PACKAGES.get(name, name).lower().replace("-", "_") not in pinned]
    assert lacking == []


def test_torch_alone_comes_from_the_index_and_the_rest_is_the_pins() -> None:
    steps = [arguments for _, arguments in unsloth_steps("https://example.org/whl")]
    assert ["--index-url" in one for one in steps] == [True, False, False, False]
    assert steps[2][-2:] == ["-r", "constraints-unsloth.txt"]
    assert "--no-deps" in steps[2]
    assert not any("--index-url" in one for _, one in unsloth_steps(""))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose Python only says what it was called with."""
    folder = tmp_path / "env"
    package = folder / "lib/python3.11/site-packages/trl-1.15.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.15.0\n")
    (folder / "bin").mkdir()
    python = folder / "bin/python"
    python.write_text('#!/bin/sh\necho "called $@"\nenv | grep -E "^(UNSLOTH|HF_HUB_OFFLINE|CUDA_VIS)" | sort\n')
    python.chmod(0o755)
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def test_an_environment_counts_once_it_is_whole(environment: Path) -> None:
    assert not unsloth_installed()
    (environment / "installed").write_text(fingerprint("", UNSLOTH))
    assert unsloth_installed()
    assert python_of("unsloth") == str(environment / "bin/python")
    assert versions_of("unsloth", ("trl", "peft")) == {"trl": "1.15.0", "peft": "absent"}
    assert versions_of("bnb", ("trl",)) != {"trl": "1.15.0"}


def test_its_python_is_really_started_offline_and_told_to_leave_trl_alone(environment: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    spec = launch_spec(unsloth_config(), plan_by_hand("single", gpus=1, kernels="unsloth"), run, INPUTS)
    assert execute(spec, run, os.environ) == (0, [])
    said = run.log.read_text().splitlines()
    assert said == [
        f"called -m sft_play.runtime.unsloth_worker {run.run_json}",
        "CUDA_VISIBLE_DEVICES=GPU-00",
        "HF_HUB_OFFLINE=1",
        "UNSLOTH_ALLOW_CPU=1",
        f"UNSLOTH_COMPILE_LOCATION={run.launch / 'unsloth'}",
        "UNSLOTH_DISABLE_STATISTICS=1",
    ]


def test_under_ddp_the_launcher_is_of_that_environment_too(environment: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    spec = launch_spec(unsloth_config(), plan_by_hand("ddp", kernels="unsloth"), run, INPUTS)
    assert spec.argv[0] == str(environment / "bin/python")
    assert spec.argv[-2:] == ("sft_play.runtime.unsloth_worker", str(run.run_json))
    bnb = launch_spec(make_config(), plan_by_hand("ddp"), run, INPUTS)
    assert bnb.argv[0] != spec.argv[0]
    assert not [name for name in bnb.environment if name.startswith("UNSLOTH")]


def test_the_stamp_holds_the_backend_and_the_versions_of_its_environment(environment: Path) -> None:
    who = Identities(base="b", tokenizer="t", template="c", data="d")
    stamp = make_stamp(unsloth_config(), plan_by_hand("single"), who)
    assert (stamp["backend"], stamp["versions"]["trl"], stamp["versions"]["unsloth"]) == ("unsloth", "1.15.0", "absent")
    assert make_stamp(make_config(), plan_by_hand("single"), who)["backend"] == "bnb"


def planned(config: Config, hardware: str, model: str = "Qwen/Qwen3-8B") -> Plan:
    inputs = PlanInputs(config=config, hardware=parse_hardware(hardware), facts=read_model_facts(model))
    return make_plan(replace(inputs, only=allowed_layouts(config)))


def test_the_plan_takes_its_kernels_one_gpu_or_ddp_and_no_other() -> None:
    config = unsloth_config(tuning={"mode": "qlora"}, model={"name": "Qwen/Qwen3-8B", "max_seq_len": 2048})
    plan = planned(config, "1xRTX4090")
    assert (plan.strategy, plan.kernels, plan.loss) == ("single", "unsloth", "fused")
    assert any("kernels unsloth" in reason for reason in plan.reasons)
    assert planned(config, "4xRTX4090").strategy == "ddp"
    assert {layout.placement.value for layout in allowed_layouts(config)} == {"single", "ddp"}


def test_what_it_has_no_layers_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="no fast layers for phi3"):
        planned(unsloth_config(), "1xH100-80", "microsoft/Phi-3-mini-4k-instruct")


def test_another_makers_gpu_is_none_for_it() -> None:
    (card,) = parse_hardware("1xMI300X").gpus
    with pytest.raises(EnvironmentProblem, match="needs a CUDA GPU and MI300X is none"):
        refuse_without_cuda(unsloth_config(), replace(card, amd=True))
    refuse_without_cuda(make_config(), None)
