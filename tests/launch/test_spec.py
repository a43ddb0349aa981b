"""Every launch as a value: the command lines as a golden file, and what else a launch writes and sets.

    python -m tests.launch.test_spec --write

writes the golden file anew; the difference is then part of the review.
"""

from __future__ import annotations

import difflib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.spec import LaunchSpec, WorkerInputs, launch_spec
from tests.launch.planned import FOLDER, STRATEGIES, make_config, make_plan, make_run

GOLDEN = Path(__file__).parent / "golden" / "commands.txt"
HEADER = """\
The command line of every strategy on 1 or 2 machines of 1, 2 or 8 GPUs, and of groups without GPUs.
PYTHON is the interpreter; the run's folder has spaces and a quote in it.
Written by python -m tests.launch.test_spec --write
"""
INPUTS = WorkerInputs(model_path=Path("/m"), splits={"train": Path("/d/train")}, stamp={}, config_yaml="model: {}\n")
LAUNCHED = tuple(name for name in STRATEGIES if name not in ("single", "layer_split"))


def spec_of(
    strategy: str, *, nodes: int = 1, gpus: int = 2, node_rank: int = 0, restarts: int = 0, **changes: Any
) -> LaunchSpec:
    config = make_config(nodes=nodes, node_rank=node_rank)
    plan = make_plan(strategy, nodes=nodes, gpus=gpus, **changes)
    return launch_spec(config, plan, make_run(node_rank), INPUTS, restarts=restarts)


def cases() -> Iterator[tuple[str, LaunchSpec]]:
    for strategy in STRATEGIES:
        for nodes in (1, 2):
            for gpus in (1, 2, 8):
                for node_rank in range(nodes):
                    alone = strategy in ("single", "layer_split", "tp")  # of one machine
                    if (strategy in LAUNCHED[:4] and nodes * gpus < 2) or (alone and nodes > 1):
                        continue
                    name = f"{strategy}, {nodes} x {gpus} GPUs" + (f", machine {node_rank}" if nodes > 1 else "")
                    yield name, spec_of(strategy, nodes=nodes, gpus=gpus, node_rank=node_rank)
    for strategy in ("single", *LAUNCHED):
        yield f"{strategy}, CPU", spec_of(strategy, cpu=True)
    for node_rank in (0, 1):
        yield f"ddp, 2 x 2 CPU, machine {node_rank}", spec_of("ddp", nodes=2, node_rank=node_rank, cpu=True)
        again = spec_of("fsdp", nodes=2, gpus=8, node_rank=node_rank, restarts=3)
        yield f"fsdp, 2 x 8 GPUs, machine {node_rank}, three restarts", again
    yield "ddp, 1 x 2 GPUs, three restarts", spec_of("ddp", restarts=3)


def render() -> str:
    """The whole file."""
    lines = [HEADER]
    for name, spec in cases():
        lines += [name, f"  {shlex.join(spec.argv).replace(sys.executable, 'PYTHON')}"]
    return "\n".join([*lines, ""])


def test_the_command_lines_are_those_that_were_reviewed() -> None:
    was, now = GOLDEN.read_text(encoding="utf-8"), render()
    if was != now:
        changed = difflib.unified_diff(was.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=1)
        again = "python -m tests.launch.test_spec --write, and review the difference"
        raise AssertionError("\n".join([*changed, again]))


def test_a_shell_that_is_given_the_command_file_sees_the_same_words() -> None:
    """The path has spaces and a quote; what is written for a person to paste means what was run."""
    spec = spec_of("fsdp")
    text = spec.files[FOLDER / "launch/command.txt"].strip()
    script = f"show() {{ printf '%s\\0' \"$@\"; }}; set -f; {text.replace(shlex.quote(sys.executable), 'show', 1)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert tuple(done.stdout.decode().split("\0")[:-1]) == spec.argv[1:]
    assert text.startswith("TOKENIZERS_PARALLELISM=false ")
    assert " CUDA_VISIBLE_DEVICES=GPU-00,GPU-01 " in text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_planned_gpus_are_seen_and_other_variables_pass(strategy: str) -> None:
    spec = spec_of(strategy)
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "GPU-00,GPU-01"
    assert not [name for name in spec.environment if name.startswith(("NCCL_", "GLOO_", "TORCH_"))]
    assert spec.alone == (strategy in ("single", "layer_split"))


def test_no_port_is_fixed_on_one_machine_unless_asked_for() -> None:
    config = make_config(dist={"main_port": 12345})
    for cpu, fixed in ((True, "--master-port=12345"), (False, "main_process_port: 12345")):
        plan = make_plan("ddp", cpu=cpu)
        free = launch_spec(make_config(), plan, make_run(), INPUTS)
        asked = launch_spec(config, plan, make_run(), INPUTS)
        everything = " ".join([*asked.argv, *asked.files.values()])
        assert fixed in everything
        assert fixed not in " ".join([*free.argv, *free.files.values()])
        assert ("--standalone" in free.argv) == cpu


def test_a_machine_never_writes_over_what_machine_0_wrote() -> None:
    first, second = (spec_of("zero2", nodes=2, node_rank=rank).files for rank in (0, 1))
    assert not set(first) & set(second)
    assert all(path.is_relative_to(FOLDER / "launch/node-1") for path in second)
    told = json.loads(second[FOLDER / "launch/node-1/run.json"])
    assert (told["run"], told["node"]) == (str(FOLDER), 1)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.launch.test_spec --write")
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(render(), encoding="utf-8")
