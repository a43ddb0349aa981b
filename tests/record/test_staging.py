"""Results grow in a place of their own: one writer at a time, nothing left of a try, nothing that is read replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import EnvironmentProblem, Interrupted, ModelError
from sft_play.record.results import refuse_overlap
from sft_play.record.staging import staged


def test_what_is_whole_gets_its_name(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as place:
        place.mkdir()
        (place / "file").write_text("whole")
        place.rename(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/file").read_text() == "whole"


@pytest.mark.parametrize(("raised", "seen"), [(KeyboardInterrupt(), Interrupted), (OSError("full"), OSError)])
def test_nothing_is_left_of_a_try(tmp_path: Path, raised: BaseException, seen: type[Exception]) -> None:
    def fail() -> None:
        with staged(tmp_path / "out") as place:
            place.mkdir()
            raise raised

    with pytest.raises(seen):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_try_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".out.new"
    (left / "out").mkdir(parents=True)
    (left / "link").symlink_to(tmp_path)
    with staged(tmp_path / "out") as place:
        assert list(place.parent.iterdir()) == []
    assert tmp_path.is_dir()
    assert not left.exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as place:
        place.write_text("mine")
        with pytest.raises(EnvironmentProblem, match="another command is writing it"), staged(tmp_path / "out"):
            pass
        assert place.read_text() == "mine"


@pytest.mark.parametrize("output", ["base", "base/sub", ".", "link"])
def test_what_is_read_is_not_written_to(tmp_path: Path, output: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    with pytest.raises(ModelError, match="which it is made from"):
        refuse_overlap(tmp_path / output, tmp_path / "base")
    refuse_overlap(tmp_path / "other", tmp_path / "base")
