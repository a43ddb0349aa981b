"""Data sets of the hub: which files are a split's, from a cache laid out as the hub's own, and why one is not there."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub
from huggingface_hub.utils import filter_repo_objects, hf_raise_for_status

from sft_play.config.schema import Config, DataSource
from sft_play.data.formats import Row, read_rows
from sft_play.data.hub import choose_files, is_hub_id
from sft_play.data.sources import SourceFiles, resolve_sources
from sft_play.errors import DataError, DiskFullError, EnvironmentProblem, SftPlayError
from sft_play.record.run_dir import must_match

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROW = b'{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with one data set, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    data = repository / "snapshots" / COMMIT
    for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/valid.jsonl"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(ROW)
    (data / "README.md").write_text("train")
    return repository


def source_of(path: str | tuple[DataSource, ...], key: str = "data.train", **more: Any) -> SourceFiles:
    (source,) = resolve_sources(path, key=key, default_format="auto", **more)
    return source


def test_a_split_of_the_key_or_by_name(cache: Path) -> None:
    train = source_of("owner/name")
    assert [file.shown for file in train.files] == [
        "owner/name/data/train-00000-of-00002.jsonl",
        "owner/name/data/train-00001-of-00002.jsonl",
    ]
    assert (train.origin, train.path) == (f"owner/name@{COMMIT}", "owner/name")
    rows = [row for file in train.files for row in read_rows(file, {}, set())]
    assert [isinstance(row, Row) for row in rows] == [True, True]
    for found in (source_of("owner/name", "data.validation"), source_of("owner/name:validation")):
        assert [file.shown for file in found.files] == ["owner/name/data/valid.jsonl"]
    with pytest.raises(DataError, match="no files of the split test; its splits: train, validation") as caught:
        source_of("owner/name", "data.test")
    assert caught.value.where == "data.test"


def test_a_tag_or_a_commit_is_read_instead_of_the_default_branch(cache: Path) -> None:
    earlier = COMMIT[::-1]
    (cache / "snapshots" / earlier).mkdir()
    (cache / "snapshots" / earlier / "train.jsonl").write_bytes(ROW)
    (cache / "refs" / "v1.0").write_text(earlier)
    for revision, commit in (("v1.0", earlier), (earlier, earlier), (COMMIT, COMMIT), ("main", COMMIT), (None, COMMIT)):
        for fetch in (True, False):
            found = source_of((DataSource(path="owner/name:train", revision=revision),), fetch=fetch)
            assert found.origin == f"owner/name@{commit}"
            assert {file.path.relative_to(cache / "snapshots").parts[0] for file in found.files} == {commit}
    with pytest.raises(EnvironmentProblem, match="owner/name is not whole on this disk"):
        source_of((DataSource(path="owner/name", revision="v2.0"),))


def test_a_revision_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROW)
    with pytest.raises(DataError, match=r"revision v1 for .*rows.jsonl, which is here: a file or folder has none"):
        source_of((DataSource(path=str(tmp_path / "rows.jsonl"), revision="v1"),))


def test_a_run_of_another_revision_is_another_run_and_those_without_stay_what_they_were() -> None:
    def held(**more: str) -> dict[str, Any]:
        source = {"path": "owner/name", **more}
        config = Config.model_validate({"model": {"name": "m"}, "data": {"train": [source]}})
        assert Config.model_validate_json(config.model_dump_json()) == config
        train: dict[str, Any] = must_match(config)["data"]["train"][0]
        return train

    assert held() == {"path": "owner/name", "weight": None, "format": "auto", "max_rows": None}
    assert held(revision="v1.0") == {**held(), "revision": "v1.0"}


def test_what_is_not_whole_offline_is_refused(cache: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="owner/other is not whole on this disk and HF_HUB_OFFLINE is set"):
        source_of("owner/other")
    entry = {"size": 1, "blob_id": "x"}
    listing = dict.fromkeys(("data/train-00000-of-00002.jsonl", "data/train-00002-of-00002.jsonl"), entry)
    (cache / "trees").mkdir()
    (cache / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    with pytest.raises(EnvironmentProblem, match="owner/name is not whole on this disk"):
        source_of("owner/name")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "a.jsonl").write_bytes(ROW)
    assert [file.shown for file in source_of("owner/name").files] == ["owner/name/a.jsonl"]
    assert source_of("owner/name").origin == ""


@pytest.mark.parametrize(
    ("files", "split", "key", "chosen"),
    [
        (["train.csv", "test.csv"], "", "train", ["train.csv"]),
        (["rows.jsonl"], "", "train", ["rows.jsonl"]),
        (["rows.jsonl", "test.jsonl"], "", "train", ["rows.jsonl"]),
        (["dev.jsonl", "restrained.jsonl"], "", "train", ["restrained.jsonl"]),
        (["my_train.jsonl", "my_dev.jsonl"], "", "validation", ["my_dev.jsonl"]),
        (["train/a.parquet", "train/b.parquet", "test/a.parquet"], "", "test", ["test/a.parquet"]),
        (["train_sft.jsonl", "train_gen.jsonl"], "train_sft", "train", ["train_sft.jsonl"]),
        (["main/train.jsonl", "socratic/train.jsonl"], "main/train", "train", ["main/train.jsonl"]),
    ],
)
def test_files_of_a_split(files: list[str], split: str, key: str, chosen: list[str]) -> None:
    assert choose_files("o/n", files, split, f"data.{key}") == chosen


@pytest.mark.parametrize(
    ("files", "split", "said"),
    [
        ([], "", "o/n has no file of rows"),
        (["test.jsonl"], "", "no files of the split train; its splits: test"),
        (["rows.jsonl"], "extra", "no files of the split extra; its splits: none told by file names"),
        (["a/train.jsonl", "b/train.jsonl"], "", "this split in several folders: a, b -> name one as o/n:b/split"),
        (["train.jsonl", "train.parquet"], "", "several kinds of file: .jsonl, .parquet -> they may be the same rows"),
        (["train-00001-of-00002.csv"], "", "1 of the 2 files of train-*-of-00002.csv is here"),
        (["train.jsonl", "train.jsonl.gz"], "", "several kinds of file: .jsonl, .jsonl.gz"),
    ],
)
def test_splits_that_are_not_clear(files: list[str], split: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        choose_files("o/n", files, split, "data.train")
    assert said in caught.value.line()


def test_what_may_be_a_hub_id() -> None:
    assert all(map(is_hub_id, ("owner/name", "o-w/n.a_me", "owner/name:train", "owner/name:main/train", "a/v1.5")))
    assert not any(map(is_hub_id, ("name", "a/b/c", "./a", "../a", "/a", "a/b.jsonl", "a/b.csv.gz", "a/b.md", "a/b:")))


def answer(status: int, **headers: str) -> Exception:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = httpx2.Request("GET", "https://huggingface.co/api/datasets/owner/name")
    with pytest.raises(hub.HfHubHTTPError) as caught:
        hf_raise_for_status(httpx2.Response(status, headers=given, request=request))
    return caught.value


CAUSES = [
    (answer(403, X_Error_Code="GatedRepo"), EnvironmentProblem, "owner/name is gated -> accept its terms"),
    (answer(404, X_Error_Code="RepoNotFound"), EnvironmentProblem, "the hub has no data set of that name"),
    (answer(404, X_Error_Code="RevisionNotFound"), DataError, "owner/name has no revision v1 -> give a branch, tag"),
    (answer(401, X_Error_Message="Invalid credentials in Authorization header"), EnvironmentProblem, "your HF_TOKEN"),
    (answer(403), EnvironmentProblem, "the hub forbids you to read owner/name"),
    (answer(429), EnvironmentProblem, "too many requests (429)"),
    (answer(500), EnvironmentProblem, "the hub failed (500) while sending owner/name"),
    (OSError(errno.ENOSPC, "No space left on device"), DiskFullError, "the disk filled up"),
    (PermissionError(errno.EACCES, "Permission denied"), EnvironmentProblem, "cache cannot be written"),
    (hub.OfflineModeIsEnabled("offline"), EnvironmentProblem, "HF_HUB_OFFLINE is set -> unset HF_HUB_OFFLINE"),
    (httpx2.ConnectError("no route"), EnvironmentProblem, "the hub cannot be reached -> check the path"),
    (hub.HFValidationError("bad"), DataError, "owner/name is no hub id"),
]


@pytest.mark.parametrize(("error", "kind", "said"), CAUSES, ids=lambda part: str(part)[:30])
def test_each_cause_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[SftPlayError], said: str
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SftPlayError) as caught:
        source_of((DataSource(path="owner/name", revision="v1"),))
    assert type(caught.value) is kind
    assert said in caught.value.line()
    assert caught.value.where == "data.train"
    assert "\n" not in caught.value.line()


def test_only_rows_are_fetched_and_nothing_for_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = ["README.md", "train.jsonl", "data/test.parquet", "a.csv.zst", "b.parquet.gz", "run.py", "x/state.json"]
    there += ["dataset_infos.json", "x/dataset_info.json", ".gitattributes", "train.txt"]
    asked: dict[str, Any] = {}

    def download(_: str, **given: Any) -> str:
        asked.update(given)
        raise hub.LocalEntryNotFoundError("no snapshot here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(EnvironmentProblem, match="owner/name is not on this disk yet"):
        source_of("owner/name", fetch=False)
    assert (asked["repo_type"], asked["local_files_only"]) == ("dataset", True)
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(there, **patterns)) == ["train.jsonl", "data/test.parquet", "a.csv.zst"]
