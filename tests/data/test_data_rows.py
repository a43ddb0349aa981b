"""Reading: every format gives its rows, and every fault its own words and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.schema import DataSource
from sft_play.data.formats import Chat, Message, Pair, Row, Text, read_rows
from sft_play.data.raw import BadRow
from sft_play.data.sources import resolve_sources
from sft_play.errors import DataError, SftPlayError

GOOD = b'{"prompt": "a", "completion": "b"}'
PAIR = Pair(system="", user="a", plain_prompt="a", completion="b")


def read(path: Path, columns: dict[str, str] | None = None, unused: set[str] | None = None) -> list[Row | BadRow]:
    (source,) = resolve_sources(str(path), key="data.train", default_format="auto")
    names = set() if unused is None else unused
    return [row for file in source.files for row in read_rows(file, columns or {}, names)]


def complaint(row: Row | BadRow) -> str:
    """The bad row's line without the folder, the row's beginning and the hint."""
    assert isinstance(row, BadRow), row
    return row.error().line().split(" -> ")[0].split(" (row begins ")[0].rsplit("/", 1)[-1]


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(messages=tuple(Message(role=role, content=content) for role, content in turns))


@pytest.mark.parametrize(
    ("row", "name", "body"),
    [
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "messages",
            chat(("user", "q"), ("assistant", "a")),
        ),
        (
            {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "messages",
            chat(("user", "q"), ("assistant", "a")),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
            "messages",
            chat(("user", "q")),
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            chat(("system", "s"), ("user", "q"), ("assistant", "a")),
        ),
        (
            {"instruction": "do", "input": "", "output": "done"},
            "alpaca",
            Pair(
                system="",
                user="do",
                plain_prompt="### Instruction:\ndo\n\n### Response:\n",
                completion="done",
            ),
        ),
        (
            {"instruction": "do", "input": "this", "output": "done"},
            "alpaca",
            Pair(
                system="",
                user="do\n\nthis",
                plain_prompt="### Instruction:\ndo\n\n### Input:\nthis\n\n### Response:\n",
                completion="done",
            ),
        ),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", PAIR),
        ({"text": "running"}, "text", Text(text="running")),
    ],
)
@pytest.mark.parametrize(
    "suffix",
    [
        ".jsonl",
        ".json",
        ".csv",
        ".tsv",
        ".parquet",
        ".jsonl.gz",
        ".json.gz",
        ".csv.gz",
        ".jsonl.zst",
        ".json.zst",
        ".tsv.zst",
    ],
)
def test_every_format_in_every_file_type(
    tmp_path: Path, row: dict[str, Any], name: str, body: object, suffix: str
) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", [row])
    (read_row,) = read(path)
    assert isinstance(read_row, Row), read_row
    assert (read_row.format, read_row.body) == (name, body)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.name.removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[1]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "jsonl":
        text = "\n".join(json.dumps(row) for row in rows)
    elif kind == "json":
        text = json.dumps(rows, indent=1)
    else:
        text = csv_text(rows, "\t" if kind == "tsv" else ",")
    content = text.encode()
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(content))
    return path


def csv_text(rows: list[dict[str, Any]], separator: str) -> str:
    def cell(value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return '"' + text.replace('"', '""') + '"'

    lines = [separator.join(rows[0])] + [separator.join(cell(value) for value in row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def messages(*turns: object) -> bytes:
    return json.dumps({"messages": turns}).encode()


USER = {"role": "user", "content": "x"}


def test_a_bad_row_shows_how_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": 3, "completion": "' + b"b" * 100 + b'"}')
    (row,) = read(path)
    assert isinstance(row, BadRow)
    assert row.error().line() == (
        f"{path}:1: prompt: text expected, found a number"
        f' (row begins \'{{"prompt": 3, "completion": "{"b" * 31}...\') -> docs/data.md shows the formats'
    )


def test_columns_are_mapped_and_unused_ones_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "a", "a": "b", "id": 7}, {"q": "a"}])
    unused: set[str] = set()
    good, bad = read(path, {"prompt": "q", "completion": "a"}, unused)
    assert isinstance(good, Row)
    assert good.body == PAIR
    assert unused == {"id"}
    assert complaint(bad) == "rows.jsonl:2: a: missing (data.columns maps it to completion); the row has q"
    with pytest.raises(DataError, match="no format has a field 'promt'"):
        read(path, {"promt": "q"})


def test_folders_globs_and_what_is_not_there(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/c.csv", "README.md", "LICENSE.txt", "dataset_infos.json", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)

    def names(path: str) -> list[str]:
        (source,) = resolve_sources(path, key="data.train", default_format="auto")
        return [file.path.name for file in source.files]

    assert names(str(tmp_path)) == ["c.csv", "b.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["d.jsonl", "b.jsonl"]
    (tmp_path / "a [1].jsonl").write_bytes(GOOD)
    assert names(f"{tmp_path}/a [1].jsonl") == ["a [1].jsonl"]
    for name in ("notes.rtf", "mixed/a.jsonl", "mixed/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    for path, words in [
        (f"{tmp_path}/x*", "no file matches"),
        (f"{tmp_path}/none.jsonl", "no such file or folder"),
        ("data/none.jsonl", "no such file or folder"),
        (f"{tmp_path}/notes.rtf", "is of no readable type"),
        (f"{tmp_path}/mixed", "holds both rows and documents"),
        (f"{tmp_path}/.hidden/../a/../../none", "no such file or folder"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            names(path)
        assert caught.value.where == "data.train"
        assert caught.value.fix


def test_several_sources_keep_their_order_and_format(tmp_path: Path) -> None:
    one, two = (write_rows(tmp_path / name, [{"text": name}]) for name in ("b.jsonl", "a.jsonl"))
    sources = resolve_sources(
        (str(one), DataSource(path=str(two), format="text", max_rows=3)), key="data.train", default_format="auto"
    )
    assert [(source.files[0].path, source.files[0].format, source.max_rows) for source in sources] == [
        (one, "auto", None),
        (two, "text", 3),
    ]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(["r.jsonl", "r.json", "r.csv", "r.parquet", "r.jsonl.gz"]))
def test_any_bytes_give_rows_or_one_line(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    check_reading(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, 300), cut=st.integers(0, 20), junk=st.text(max_size=5), name=st.sampled_from(["json", "jsonl"])
)
def test_damaged_json_gives_rows_or_one_line(tmp_path: Path, start: int, cut: int, junk: str, name: str) -> None:
    rows = [json.loads(messages(USER, {"role": "assistant", "content": "y"})) for _ in range(3)]
    path = write_rows(tmp_path / f"rows.{name}", rows)
    content = path.read_bytes()
    path.write_bytes(content[:start] + junk.encode(errors="replace") + content[start + cut :])
    check_reading(path)


def check_reading(path: Path) -> None:
    lines = []
    try:
        lines = [row.error().line() for row in read(path) if isinstance(row, BadRow)]
    except SftPlayError as error:
        lines = error.lines()
    assert all(line and "\n" not in line for line in lines)
