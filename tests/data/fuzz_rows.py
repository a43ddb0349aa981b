"""Damage valid files at random and read them: rows, bad rows or one error of ours come out, and soon.

    python -m tests.data.fuzz_rows --seconds 120 --seed 1

A file that makes anything else happen is kept and named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import io
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from sft_play.data.formats import Row, read_rows
from sft_play.data.sources import SUFFIXES, resolve_sources
from sft_play.data.validate import Rejects, survey_rows
from sft_play.errors import SftPlayError
from tests.data.malformed.made import parquet, pdf, word

LIMIT_SECONDS = 5
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome", "days": [1, 2]}'}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "é😀"}]},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "1"},
                {"role": "assistant", "content": "a\n😀", "weight": 1},
            ],
            "tools": [_TOOL],
        },
    ],
    "sharegpt": [
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "a"},
            ],
        },
    ],
    "alpaca": [{"instruction": "i", "input": "x", "output": "o"}],
    "turns": [{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}],
    "pairs": [{"prompt": "a", "completion": "b", "n": -1.5e3}],
    "text": [{"text": 'running text, a \\ and a " in it'}],
}
_JUNK = (
    b"\0",
    b"\xff",
    b'"',
    b"\\",
    b"[",
    b"{",
    b"]",
    b"}",
    b",",
    b":",
    b"\n",
    b"\r",
    b"NaN",
    b"null",
    b"1e9",
    b"\\ud800",
    b"\xef\xbb\xbf",
)


def valid_files() -> dict[str, bytes]:
    """Names and contents of files of every kind and format, all of which read well."""
    files: dict[str, bytes] = {}
    for name, rows in _ROWS.items():
        several = rows * 5
        jsonl = "\n".join(json.dumps(row, ensure_ascii=name == "messages") for row in several).encode()
        cells = [[value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in several]
        header = list(rows[0])
        table = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in [header, *cells])
        files |= {
            f"{name}.jsonl": jsonl,
            f"{name}.json": json.dumps(several, indent=1).encode(),
            f"{name}.csv": table.encode(),
            f"{name}.tsv": table.replace('","', '"\t"').encode(),
            f"{name}.jsonl.gz": gzip.compress(jsonl, mtime=0),
            f"{name}.csv.zst": zstandard.compress(table.encode()),
            f"{name}.parquet": parquet(*_for_parquet(several)),
            f"{name}.plain.parquet": parquet(*_for_parquet(several), compression="none"),
        }
    files |= {"notes.txt": b"a\nb\xc3\xa4\r\n", "notes.md": b"# a\n", "notes.md.zst": zstandard.compress(b"# a\n" * 99)}
    files |= {"notes.docx": word("a", "b", table=[["c", "d"]]), "notes.pdf": pdf("a", "b")}
    return files


def _for_parquet(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as text in every turn: a column has one type."""
    parts = json.dumps(_ROWS["messages"][0]["messages"][1]["content"])
    made: list[dict[str, Any]] = json.loads(json.dumps(rows).replace(parts, '"q"'))
    return made


def damage(content: bytes, other: bytes, chance: random.Random) -> bytes:
    """One to four changes: flipped, cut, doubled, swapped, spliced or inserted bytes."""
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        start = chance.randrange(len(made) + 1)
        end = min(len(made), start + chance.choice((1, 2, 8, 64, 1024)))
        match chance.randrange(7):
            case 0 if made:
                at = chance.randrange(len(made))
                made[at] ^= 1 << chance.randrange(8)
            case 1 if made:
                made[chance.randrange(len(made))] = chance.randrange(256)
            case 2:
                del made[start:end]
            case 3:
                del made[start:]
            case 4:
                made[start:start] = made[start:end] * chance.choice((1, 1, 3, 50))
            case 5:
                begin = chance.randrange(len(other) + 1)
                made[start:end] = other[begin : begin + chance.choice((1, 8, 64, 1024))]
            case _:
                made[start:end] = chance.choice(_JUNK) * chance.choice((1, 1, 2, 2000))
    return bytes(made)


def _damage_inside(name: str, content: bytes, other: bytes, chance: random.Random) -> bytes:
    """Damage the file, or what is packed in it, so that the faults get past the unpacking."""
    inside = chance.random() < 0.7
    if inside and name.endswith(".gz"):
        return gzip.compress(damage(gzip.decompress(content), other, chance), 1, mtime=0)
    if inside and name.endswith(".zst"):
        return zstandard.compress(damage(zstandard.decompress(content), other, chance))
    if inside and name.endswith(".docx"):
        return _damage_zip(content, other, chance)
    return damage(content, other, chance)


def _damage_zip(content: bytes, other: bytes, chance: random.Random) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as packed, zipfile.ZipFile(made, "w") as again:
        names = packed.namelist()
        hurt = chance.choice([*names, *["word/document.xml"] * len(names)])
        for name in names:
            part = packed.read(name)
            again.writestr(name, damage(part, other, chance) if name == hurt else part)
    return made.getvalue()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside; where that cannot come through, the process ends with its stacks printed."""

    def late(*_: object) -> None:
        raise TimeoutError(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds * 4, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_file(path: Path) -> str:
    """Read a file as preparing does; `rows`, `bad rows` or `refused`.

    Raises:
        Exception: the fault that was looked for.
    """
    try:
        source = resolve_sources(str(path), key="data.train", default_format="auto")
        rows = list(read_rows(source[0].files[0], {}, unused := set()))
        bad = [row.error().line() for row in rows if not isinstance(row, Row)]
        rejects = Rejects("skip")
        if rows:
            survey_rows("train", source, {}, 0, rejects, lambda _: None)
    except SftPlayError as error:
        _check_lines(error.lines())
        return "refused"
    _check_lines([*bad, *unused])
    assert len(rejects.rows) == len(bad)
    return "bad rows" if bad else "rows"


def _check_lines(lines: list[str]) -> None:
    for line in lines:
        line.encode()
        assert line
        assert "\n" not in line
        assert line.isprintable(), line


def fuzz(folder: Path, seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Read damaged files until the time is over.

    Returns:
        How many came out how, and each kind of fault once with the file that shows it.
    """
    chance = random.Random(seed)
    files = valid_files()
    names, counts = list(files), Counter[str]()
    faults: dict[str, str] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = chance.choice(names)
        content = _damage_inside(name, files[name], files[chance.choice(names)], chance)
        if chance.random() < 0.05:
            name = "renamed" + chance.choice([*SUFFIXES])
        path = folder / name
        path.write_bytes(content)
        try:
            with time_limit(LIMIT_SECONDS):
                counts[check_file(path)] += 1
        except Exception as error:
            counts["fault"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
            if where not in faults:
                kept = folder / f"fault-{len(faults)}-{name}"
                kept.write_bytes(content)
                faults[where] = f"{where}: {str(error)[:200]} ({kept})"
    return counts, list(faults.values())


def main() -> int:
    """Run for a time and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-rows-"))
    counts, faults = fuzz(folder, options.seconds, options.seed)
    print(f"{counts.total():,} files: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items())))
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
