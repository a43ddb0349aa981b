"""Reading: every format gives its rows, and every fault its own words and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
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
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz"])
def test_every_format_in_every_file_type(
    tmp_path: Path, row: dict[str, Any], name: str, body: object, suffix: str
) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", [row])
    (read_row,) = read(path)
    assert isinstance(read_row, Row), read_row
    assert (read_row.format, read_row.body) == (name, body)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "jsonl":
        text = "\n".join(json.dumps(row) for row in rows)
    elif kind == "json":
        text = json.dumps(rows, indent=1)
    else:
        text = csv_text(rows)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def csv_text(rows: list[dict[str, Any]]) -> str:
    def cell(value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return '"' + text.replace('"', '""') + '"'

    lines = [",".join(rows[0])] + [",".join(cell(value) for value in row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def messages(*turns: object) -> bytes:
    return json.dumps({"messages": turns}).encode()


USER = {"role": "user", "content": "x"}
JSONL_FAULTS = [
    (GOOD + b'\n{"prompt": "a", "comple', "rows.jsonl:2: the last line is cut off"),
    (b'{"prompt": "\xff", "completion": "b"}\n', "rows.jsonl:1: not UTF-8: byte 0xff at position 13"),
    (b'{"prompt": "a" "completion": "b"}\n', "rows.jsonl:1: not JSON: expecting ',' delimiter at column 16"),
    (GOOD + b" x", "rows.jsonl:1: not JSON: extra data at column 36"),
    (
        b"{'prompt': 'a'}",
        "rows.jsonl:1: not JSON: expecting property name enclosed in double quotes at column 2",
    ),
    (b'{"prompt": "a\x00"}', "rows.jsonl:1: not JSON: invalid control character at column 14"),
    (b"[1, 2]\n", "rows.jsonl:1: an object with fields expected, found a list"),
    (b"null\n", "rows.jsonl:1: an object with fields expected, found null"),
    (b"NaN\n", "rows.jsonl:1: NaN is not JSON"),
    (b'{"prompt": -Infinity, "completion": "b"}', "rows.jsonl:1: -Infinity is not JSON"),
    (
        b'{"prompt": "a", "prompt": "c", "completion": "b"}',
        "rows.jsonl:1: the field prompt stands twice in one object",
    ),
    (b"[" * 100_000, "rows.jsonl:1: nested too deeply"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", "rows.jsonl:1: a number has too many digits"),
    (b'{"prompt": null, "completion": "b"}', "rows.jsonl:1: prompt: text expected, found null"),
    (b'{"prompt": ["x"], "completion": "b"}', "rows.jsonl:1: prompt: text expected, found a list"),
    (b'{"prompt": 3, "completion": "b"}', "rows.jsonl:1: prompt: text expected, found a number"),
    (b'{"prompt": true, "completion": "b"}', "rows.jsonl:1: prompt: text expected, found true or false"),
    (b'{"prompt": "\\ud800", "completion": "b"}', "rows.jsonl:1: prompt: not UTF-8 text at character 1"),
    (
        b'{"promt": "a", "completion": "b"}',
        "rows.jsonl:1: no known format has the fields promt, completion; name them in data.columns",
    ),
    (b"{}", "rows.jsonl:1: no known format has the fields none; name them in data.columns"),
    (GOOD + b'\r\n\r\n{"prompt": "a"}', "rows.jsonl:3: completion: missing; found prompt"),
    (
        GOOD + b'\n{"text": "a"}',
        "rows.jsonl:2: prompt: missing; found text; the row looks like text in a file of prompt_completion: put it into a file of its own",
    ),
    (b'{"messages": {}}', "rows.jsonl:1: messages: a list of messages expected, found an object"),
    (messages("hi"), "rows.jsonl:1: messages[0]: an object with role and content expected, found text"),
    (messages([USER]), "rows.jsonl:1: messages[0]: an object with role and content expected, found a list"),
    (messages({"role": "user"}), "rows.jsonl:1: messages[0].content: missing; found role"),
    (messages({"content": "x"}), "rows.jsonl:1: messages[0].role: missing; found content"),
    (
        messages(USER, {"role": "bot", "content": "x"}),
        "rows.jsonl:1: messages[1].role: unknown role 'bot'; known are system, developer, user, assistant, tool, function",
    ),
    (
        messages(USER, {"role": "tool", "content": "x"}),
        "rows.jsonl:1: messages[1]: a tool's result before any assistant turn",
    ),
    (
        messages(USER | {"tool_calls": [1]}),
        "rows.jsonl:1: messages[0].tool_calls[0]: a call as an object expected, found a number",
    ),
    (messages(USER | {"content": None}), "rows.jsonl:1: messages[0].content: text expected, found null"),
    (messages(USER | {"train": 1}), "rows.jsonl:1: messages[0].train: true or false expected, found a number"),
    (
        messages({"role": "system", "content": "x"}, {"role": "system", "content": "y"}),
        "rows.jsonl:1: messages[1]: a second system message",
    ),
    (
        messages(USER, {"role": "system", "content": "y"}),
        "rows.jsonl:1: messages[1]: a system message after the first turn",
    ),
    (
        b'{"conversations": [{"from": "alien", "value": "x"}]}',
        "rows.jsonl:1: conversations[0].from: unknown role 'alien'; "
        "known are system, developer, human, user, gpt, assistant, chatgpt, bing, bard, model, function_call, tool, function, "
        "observation, function_response, tool_response",
    ),
    (b'{"conversations": [{"from": "human"}]}', "rows.jsonl:1: conversations[0].value: missing; found from"),
    (b'{"instruction": "i", "input": 4, "output": "o"}', "rows.jsonl:1: input: text expected, found a number"),
]


@pytest.mark.parametrize(("content", "expected"), JSONL_FAULTS)
def test_jsonl_faults(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert complaint(read(path)[-1]) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.json", b"[", "rows.json:1: the list is cut off"),
        ("rows.json", b"[\n" + GOOD + b",\n", "rows.json:3: the list is cut off"),
        ("rows.json", b"[" + GOOD + b",]", "rows.json:1: not JSON: expecting value at column 37"),
        ("rows.json", b"[\n" + GOOD + b"\n" + GOOD, "rows.json:3: not JSON: expecting ',' delimiter at column 1"),
        ("rows.json", b"[\n" + GOOD + b"\n]\nx", "rows.json:3: text after the list"),
        ("rows.json", b"[\n\n1]", "rows.json:3: an object with fields expected, found a number"),
        ("rows.json", b'[\n{"prompt": "\xff"}]', "rows.json:2: not UTF-8: byte 0xff at position 15"),
        ("rows.csv", b"prompt,completion\na,b\n\xff,b\n", "rows.csv:3: prompt: not UTF-8 text at character 1"),
        (
            "rows.csv",
            b'prompt,completion\r\na,"b\r\nc"\r\nd,e,f\r\n',
            "rows.csv:4: 3 cells where the header has 2 columns",
        ),
        ("rows.csv", b'prompt,completion\n"a,b\n', "rows.csv:2: not CSV: unexpected end of data"),
    ],
)
def test_faults_of_other_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert complaint(read(path)[-1]) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b"\xff\xfe" + GOOD, "the file is UTF-16 -> save it as UTF-8"),
        ("rows.json", b'{\n"data": []}', "the file is neither a JSON list of rows nor one row a line"),
        ("rows.csv", b"prompt,prompt\na,b", "a column name stands twice in the header -> rename one"),
        ("rows.csv", b'"prompt', "the header is not CSV: unexpected end of data"),
        ("rows.jsonl.gz", b"junk", "damaged gzip file"),
        ("rows.jsonl.gz", gzip.compress(GOOD * 999, mtime=0)[:20], "damaged gzip file"),
        ("rows.parquet", b"junk", "not a whole Parquet file"),
    ],
)
def test_whole_files_refused(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")) as caught:
        read(path)
    assert expected in caught.value.line()


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("rows.jsonl", b"\xef\xbb\xbf" + GOOD, [1]),
        ("rows.jsonl", GOOD + b"\r\n\r\n" + GOOD + b"\r\n", [1, 3]),
        ("rows.jsonl", b"\n \n", []),
        ("rows.jsonl", b'{"prompt": "\\u0000", "completion": "b"}', [1]),
        ("rows.json", b"\xef\xbb\xbf[\n" + GOOD + b",\r\n\r\n" + GOOD + b"]", [2, 4]),
        ("rows.json", GOOD + b"\n" + GOOD, [1, 2]),
        ("rows.json", b" [ ] ", []),
        ("rows.csv", b'\xef\xbb\xbfprompt,completion\r\n"a\r\n\r\nb",c\r\nd,e', [2, 5]),
    ],
)
def test_tolerated_files(tmp_path: Path, name: str, content: bytes, lines: list[int]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    rows = read(path)
    assert all(isinstance(row, Row) for row in rows), rows
    assert [row.line for row in rows] == lines


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
