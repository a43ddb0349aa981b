"""The decision tree of the plan as a golden file: machine x method x model, to be read and reviewed like text.

    python -m tests.plan.test_decision_tree --write

writes it anew after the plan has changed; the difference is then part of the review.
"""

from __future__ import annotations

import difflib
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.schema import Config
from sft_play.facts.hardware import GIB, Hardware, parse_hardware
from sft_play.facts.model import read_model_facts
from sft_play.plan.build import PlanInputs, choose
from sft_play.plan.settings import Checkpointing
from sft_play.plan.strategy import Candidate, Choice

GOLDEN = Path(__file__).parent / "golden" / "decision_tree.txt"
MACHINES = (
    "cpu", "1xT4", "8xT4", "8xT4, 30 GiB RAM", "1xRTX4090", "2xRTX4090", "8xL40S",
    "1xA100-80", "2xA100-80", "8xA100-80", "2x8xA100-80", "4xH200",
)  # fmt: skip
MODELS = (
    "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B",
)  # fmt: skip
METHODS = ("full", "lora", "qlora")
# From what needs most memory on a GPU to what needs least: the order in which a growing model meets them.
BRANCHES = (
    ("single", "ddp"), ("zero1",), ("zero2",), ("fsdp", "hsdp", "zero3", "tp"),
    ("zero2 + optimizer offload", "zero3 + optimizer offload"), ("zero3 + params offload", "fsdp + params offload"),
    ("layer_split",),
)  # fmt: skip
HEADER = """\
What the plan chooses: 2,048 tokens a row, nothing fixed but the method, so 32 rows a step (or the next multiple).
Columns: model, strategy, micro-batch x accumulation x data-parallel ranks, checkpointing, GiB needed on each GPU (on a
machine without, of RAM), GiB of host memory in all, tokens/s, and the runner-up with its speed beside the chosen one's.
A machine has as much RAM as is needed where none is named. Where nothing fits, the layout that comes nearest is shown.
Written by python -m tests.plan.test_decision_tree --write
"""


def test_the_decision_tree_is_the_one_that_was_reviewed() -> None:
    was, now = GOLDEN.read_text(encoding="utf-8"), render()
    if was != now:
        changed = difflib.unified_diff(was.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=0)
        again = "python -m tests.plan.test_decision_tree --write, and review the difference"
        raise AssertionError("\n".join([*changed, again]))


def test_every_branch_is_taken_somewhere() -> None:
    names = {chosen_name(model, method, machine) for model in MODELS for method in METHODS for machine in MACHINES}
    for branch in BRANCHES:
        assert names & set(branch), branch


@pytest.mark.parametrize("machine", MACHINES)
def test_a_larger_model_never_goes_back_to_an_earlier_branch(machine: str) -> None:
    """Full fine-tuning: what stops fitting keeps not fitting. An adapter may trade recomputing for shards."""
    depths = [_depth(chosen_name(model, "full", machine)) for model in MODELS]
    assert depths == sorted(depths)


def _depth(name: str) -> int:
    return next((depth for depth, branch in enumerate(BRANCHES) if name in branch), len(BRANCHES))


def chosen_name(model: str, method: str, machine: str) -> str:
    """The chosen layout; empty where nothing fits."""
    chosen = choose_for(model, method, machine).chosen
    return chosen.layout.name if chosen else ""


def render() -> str:
    """The whole file."""
    return "\n".join([HEADER, *(line for name in MACHINES for line in machine_lines(name))])


def machine_lines(name: str) -> Iterator[str]:
    """One machine: a heading, and a table for each method."""
    hardware = machine_of(name)
    yield f"{name}{heading(hardware)}"
    for method in METHODS:
        for model in MODELS:
            yield f"  {method:<6}{model.split('/')[1]:<14}{row(choose_for(model, method, name), hardware)}".rstrip()
        yield ""


def machine_of(name: str) -> Hardware:
    """A described machine, with `, N GiB RAM` where its RAM is part of the case."""
    described, _, ram = name.partition(", ")
    return replace(parse_hardware(described), ram_bytes=int(ram.split()[0]) * GIB if ram else 0)


def heading(hardware: Hardware) -> str:
    if not hardware.gpus:
        return ""
    link = f", {hardware.link.value} {hardware.link_bytes_per_second / 1e9:.0f} GB/s" if len(hardware.gpus) > 1 else ""
    return f": {hardware.smallest_gpu_bytes / GIB:.1f} GiB each{link}"


@functools.cache
def choose_for(model: str, method: str, machine: str) -> Choice:
    """What the plan chooses for a config that fixes nothing but model and method."""
    values = {"model": {"name": model}, "tuning": {"mode": method}, "data": {"train": "absent"}}
    config = Config.model_validate(values)
    return choose(PlanInputs(config=config, hardware=machine_of(machine), facts=read_model_facts(model)))


def row(choice: Choice, hardware: Hardware) -> str:
    """The chosen layout, or the nearest miss."""
    if choice.chosen is None:
        nearest = min(choice.candidates, key=lambda one: one.memory.needed_bytes)
        return f"nothing fits; {nearest.layout.name} comes nearest with {gib(nearest.memory.needed_bytes)} GiB"
    one = choice.chosen
    batch = f"{one.batch.micro_batch} x {one.batch.grad_accum} x {one.batch.data_parallel}"
    recomputes = one.settings.checkpointing is not Checkpointing.NONE
    needed = one.memory.needed_bytes if hardware.gpus else one.memory.allocated_bytes
    host = one.memory.host_bytes * hardware.world_size
    return (
        f"{one.layout.name:<27}{batch:<13}{'recompute' if recomputes else 'keep':<11}{gib(needed) + ' GiB':>9}"
        f"{'+' + gib(host) + ' host' if host else '':>11}{speed(one):>14}   {runner_up(choice)}"
    )


def runner_up(choice: Choice) -> str:
    """The best other layout that fits."""
    chosen = choice.chosen
    others = [one for one in choice.candidates if one.fits and chosen and one.layout != chosen.layout]
    if chosen is None or not others:
        return ""
    best = max(others, key=lambda one: one.tokens_per_second)
    return f"{best.layout.name} {best.tokens_per_second / chosen.tokens_per_second - 1:+.0%}"


def speed(one: Candidate) -> str:
    """Tokens a second to two figures."""
    rate = one.tokens_per_second
    if not rate:
        return "speed unknown"
    unit = 10 ** (math.floor(math.log10(rate)) - 1)
    return f"{round(rate / unit) * unit:,.0f} tok/s"


def gib(number: int) -> str:
    return f"{number / GIB:.0f}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.plan.test_decision_tree --write")
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(render(), encoding="utf-8")
