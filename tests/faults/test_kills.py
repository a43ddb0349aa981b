"""Kill -9 at every step of a save: the same command goes on, to the bit, and nothing is left over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.soak import KINDS, leftovers, make_soak, outcome, soak_for
from tests.faults.hooks import hooked
from tests.tiny import Workplace

STEPS = 12
# Where the n-th call of a function of a module ends the process, before or after its work.
FAILPOINT = """
import signal
def patch(module):
    original, calls = {owner}.{function}, []
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    def call(*args, **named):
        if not {guard}:
            return original(*args, **named)
        calls.append(1)
        if len(calls) == {nth} and {before}:
            die()
        done = original(*args, **named)
        if len(calls) == {nth}:
            die()
        return done
    {owner}.{function} = call
"""
RECORD, TRAINER = "sft_play.record.checkpoints", "sft_play.runtime.trainer"
SETTLING = "sft_play.runtime.settling"
# name -> (module that is loaded, owner, function, which calls count, the n-th of them)
POINTS = {
    "staging folder": (TRAINER, "module", "staging_folder", "True", 2),
    "weights written": (TRAINER, "module", "write_weights", "True", 2),
    "a file synced": (RECORD, "os", "fsync", "'/checkpoints/' in os.readlink(f'/proc/self/fd/{args[0]}')", 9),
    "manifest": (RECORD, "module", "write_manifest", "True", 2),
    "publishing": (TRAINER, "module", "publish", "True", 2),
    "rename": (RECORD, "module.Path", "rename", "args[0].name.startswith('checkpoint-')", 2),
    "folder synced": (RECORD, "module", "sync_folder", "True", 2),
    "rotation": (SETTLING, "module", "rotate", "True", 3),
    "trash renamed": (RECORD, "module.Path", "rename", "str(args[1]).rpartition('/')[2].startswith('.trash-')", 1),
    "trash deleted": (RECORD, "module.shutil", "rmtree", "'.trash-' in str(args[0])", 1),
    "the result": ("sft_play.runtime.save", "module.Path", "rename", "args[0].name == '.adapter.new'", 1),
}
QUICK, LONG = (
    ("rename",),
    (
        "staging folder",
        "weights written",
        "a file synced",
        "manifest",
        "folder synced",
        "rotation",
        "trash renamed",
        "publishing",
    ),
)


def marks(name: str, side: str) -> list[pytest.MarkDecorator]:
    if name in QUICK and side == "before":
        return []
    return [pytest.mark.slow if name in LONG or side == "after" else pytest.mark.fault]


CASES = [
    pytest.param(name, side, marks=marks(name, side), id=f"{side} {name}")
    for number, name in enumerate(POINTS)
    for side in (("before", "after") if name in ("rename", "trash renamed") else (("before", "after")[number % 2],))
]


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, dict[str, object]]:
    """A workplace, and what its run comes to when nobody kills it."""
    soak = make_soak(tmp_path_factory.mktemp("straight"), seed=0)
    return soak.workplace, soak.straight(KINDS[0], "straight")[0]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_a_kill_inside_a_save_changes_nothing(
    straight: tuple[Workplace, dict[str, object]], tmp_path: Path, name: str, side: str
) -> None:
    workplace, wanted = straight
    module, owner, function, guard, nth = POINTS[name]
    before = side == "before"
    patch = FAILPOINT.format(owner=owner, function=function, guard=guard, nth=nth, before=before)
    run = f"{side}-{name}".replace(" ", "-")
    killed = workplace.train(RUN_NAME=run, **hooked(tmp_path / "hook", module, patch))
    assert killed.code == 6, killed.out + killed.err
    assert "SIGKILL" in killed.error_lines[0]
    resumed = workplace.train(RUN_NAME=run)
    assert resumed.code == 0, resumed.err
    assert "set aside" not in resumed.out
    found = outcome(workplace, run)
    assert [key for key in wanted if found[key] != wanted[key]] == []
    assert leftovers(workplace.path / "runs", workplace.path / "runs" / run) == []


@pytest.mark.slow
def test_thirty_random_kills_change_nothing(tmp_path: Path) -> None:
    soak = make_soak(tmp_path, seed=random.Random(30).randrange(1000))
    soak_for(soak, 30)
    assert len(soak.kills) == 30
    assert soak.differences == []
