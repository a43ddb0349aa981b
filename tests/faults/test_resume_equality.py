"""A run that goes on from a checkpoint ends as the straight run: weights, optimizer and every loss, to the bit."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.runs import CASES, METHODS, SINGLE, Outcome
from tests.tiny import Workplace, make_rows

ROWS = 24  # three optimizer steps an epoch, but of the kinds that have long.jsonl
STEPS = 6
STOPS = {
    "mid-epoch": 4,  # in the second epoch, whose end is the run's
    "at an epoch's end": 3,
    "across epochs": 2,  # what is left begins in one epoch and ends in another
}
DATA: dict[str, dict[str, Any]] = {
    "plain": {"train": "a.jsonl"},
    "packed": {"train": "long.jsonl", "packing": True},
    "mixed": {"train": [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "weight": 1}]},
    "mixed and packed": {
        "train": [{"path": "c.jsonl", "weight": 2}, {"path": "d.jsonl", "weight": 1}],  # 24 packs
        "packing": True,
    },
    "streamed": {"train": "long.jsonl", "streaming": True},
}
LAYOUTS = {"single": SINGLE, **{name: CASES[name] for name in ("ddp", "fsdp", "zero2", "zero3")}}


class Setting(NamedTuple):
    layout: str
    method: str
    data: str
    stop: str
    dropout: float
    accumulation: int

    @property
    def name(self) -> str:
        return " ".join(str(part) for part in self).replace("'", "").replace(" ", "-")


# Every pair of two values of two settings is among these (test_every_pair_of_settings_is_covered); the stages of
# DeepSpeed that shard are one family here, and each of them apart is in the product below.
PAIRS = [
    Setting("single", "lora", "plain", "mid-epoch", 0.1, 2),
    Setting("single", "qlora", "mixed and packed", "at an epoch's end", 0.1, 2),
    Setting("single", "full", "streamed", "across epochs", 0.0, 1),
    Setting("ddp", "qlora", "plain", "across epochs", 0.0, 2),
    Setting("ddp", "full", "mixed and packed", "mid-epoch", 0.0, 1),
    Setting("ddp", "lora", "streamed", "at an epoch's end", 0.1, 1),
    Setting("fsdp", "full", "plain", "at an epoch's end", 0.0, 1),
    Setting("fsdp", "lora", "mixed and packed", "across epochs", 0.0, 2),
    Setting("fsdp", "qlora", "streamed", "mid-epoch", 0.1, 2),
    Setting("zero2", "lora", "plain", "at an epoch's end", 0.0, 1),
    Setting("zero3", "full", "mixed and packed", "mid-epoch", 0.1, 2),
    Setting("zero3", "qlora", "streamed", "across epochs", 0.1, 1),
]
IN_EVERY_TEST_RUN = {"single lora plain"}


def product() -> list[Setting]:
    """Every layout with every method and every kind of data; the other settings take turns."""
    turns = itertools.cycle(itertools.product(STOPS, (0.0, 0.1), (1, 2)))
    every = [Setting(*three, *next(turns)) for three in itertools.product(LAYOUTS, ("lora", "qlora", "full"), DATA)]
    return [setting for setting in every if setting not in PAIRS and not (setting.method == "full" and setting.dropout)]


def marked(setting: Setting, mark: pytest.MarkDecorator) -> Any:
    marks = [] if setting in PAIRS and " ".join(setting[:3]) in IN_EVERY_TEST_RUN else [mark]
    return pytest.param(setting, id=setting.name, marks=marks)


def configure(workplace: Workplace, setting: Setting) -> None:
    make_rows(workplace.path / "a.jsonl", ROWS)
    make_rows(workplace.path / "b.jsonl", ROWS // 2, first=50)
    make_rows(workplace.path / "c.jsonl", 33)
    make_rows(workplace.path / "d.jsonl", 16, first=50)
    make_rows(workplace.path / "long.jsonl", 4 * ROWS)
    settings = METHODS[setting.method]
    tuning = {**settings["tuning"]}
    if "lora" in tuning:
        tuning["lora"] = {**tuning["lora"], "dropout": setting.dropout}
    workplace.config["tuning"] = {}
    workplace.config["data"] = {}
    workplace.write(
        "run.yaml",
        model={**workplace.config["model"], **settings.get("model", {})},
        tuning=tuning,
        data=DATA[setting.data],
        train={
            "bf16": False,
            **settings.get("train", {}),
            "batch_size": 8 // LAYOUTS[setting.layout].ranks // setting.accumulation,
            "grad_accum": setting.accumulation,
            "global_batch_size": 8,
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": STOPS[setting.stop],
            "save_total_limit": STEPS,
            "eval_strategy": "no",
            "scheduler": "cosine",
            "warmup": 2,
            "weight_decay": 0.1,
        },
        run={"name": "run", "report_to": []},
    )


def train(workplace: Workplace, layout: str) -> str:
    case = LAYOUTS[layout]
    ranks = {"NUM_GPUS": str(case.ranks), **case.environ} if case.ranks > 1 else {}
    done = workplace.run("train-distributed", CONFIG="run.yaml", **ranks)
    assert done.code == 0, done.out[-1500:] + done.err
    return done.out


def differences(one: object, other: object, where: str = "") -> list[str]:
    """The places at which two nested values with tensors differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: keys"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for n, (a, b) in pairs for found in differences(a, b, f"{where}/{n}")]
    if hasattr(one, "__dict__") and type(one) is type(other):
        return differences(vars(one), vars(other), f"{where}.{type(one).__name__}")
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def optimizer_files(checkpoint: Path) -> list[Path]:
    """Files with the state of the optimizer, relative to the checkpoint; of DeepSpeed one for each rank."""
    found = [*checkpoint.glob("optimizer*.pt"), *checkpoint.rglob("*optim_states.pt")]
    return sorted(file.relative_to(checkpoint) for file in found)


def assert_equal_ends(resumed: Outcome, straight: Outcome) -> None:
    assert resumed.series("loss") == straight.series("loss")
    assert resumed.series("grad_norm") == straight.series("grad_norm")
    assert differences(resumed.weights, straight.weights) == []
    ours, theirs = (outcome.path / f"checkpoints/step-{STEPS}" for outcome in (resumed, straight))
    files = optimizer_files(theirs)
    assert files
    assert optimizer_files(ours) == files
    for file in files:
        states = [torch.load(folder / file, weights_only=False) for folder in (ours, theirs)]
        assert differences(*states, str(file)) == []


@pytest.mark.parametrize(
    "setting",
    [
        *(marked(setting, pytest.mark.fault) for setting in PAIRS),
        *(marked(setting, pytest.mark.slow) for setting in product()),
    ],
)
def test_a_resumed_run_is_the_straight_one_to_the_bit(workplace: Workplace, setting: Setting) -> None:
    configure(workplace, setting)
    train(workplace, setting.layout)
    resumed = Outcome(workplace.path / "runs/run")
    straight = Outcome(shutil.copytree(resumed.path, workplace.path / "straight"))
    for left in ("adapter", "model", *(f"checkpoints/step-{n}" for n in range(STOPS[setting.stop] + 1, STEPS + 1))):
        shutil.rmtree(resumed.path / left, ignore_errors=True)
    (resumed.path / "record.json").unlink()
    out = train(workplace, setting.layout)
    assert f"resuming from runs/run/checkpoints/step-{STOPS[setting.stop]}" in out
    assert_equal_ends(resumed, straight)


def test_every_pair_of_settings_is_covered() -> None:
    families = [setting._replace(layout=setting.layout.rstrip("23")) for setting in PAIRS]
    columns = list(zip(*families, strict=True))
    for one, other in itertools.combinations(range(len(columns)), 2):
        seen = {(setting[one], setting[other]) for setting in families}
        # Full tuning has no dropout of its own: the tiny model's layers have none.
        wanted = set(itertools.product(set(columns[one]), set(columns[other])))
        assert wanted <= seen, (one, other, wanted - seen)
    assert {setting.layout for setting in PAIRS} == set(LAYOUTS)


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    """The check's own negative control."""
    state = {"state": {0: {"exp_avg": torch.ones(3), "step": 4}}}
    other = {"state": {0: {"exp_avg": torch.tensor([1, 1, 1 + 1e-6]), "step": 4}}}
    assert differences(state, state) == []
    assert differences(state, other) == ["/state/0/exp_avg"]
    assert differences(state, json.loads("{}")) == [": keys"]


@pytest.mark.fault
def test_what_is_saved_or_the_last_is_logged_and_the_lines_after_a_checkpoint_are_the_same(
    workplace: Workplace,
) -> None:
    marks = {"logging_steps": 3, "save_steps": 4, "max_steps": 8}
    workplace.write(train={**workplace.config["train"], **marks, "eval_strategy": "no"})
    assert workplace.train().code == 0
    run = workplace.path / "runs/tiny"
    straight = Outcome(run).events("train")
    assert [one["step"] for one in straight] == [1, 3, 4, 6, 8]
    assert workplace.record()["train_loss"] == straight[-1]["loss"]
    for left in ("adapter", "checkpoints/step-8"):  # as if it had been killed after step 4
        shutil.rmtree(run / left)
    (run / "record.json").unlink()
    done = workplace.train()
    assert done.code == 0, done.err
    assert "resuming from" in done.out
    keys = ("step", "loss", "grad_norm", "learning_rate")
    resumed = Outcome(run).events("train")
    assert [[one[key] for key in keys] for one in resumed] == [[one[key] for key in keys] for one in straight]
