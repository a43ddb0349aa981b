"""What the cases are made of: files of every kind, as bytes."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from typing import Any

import docx
import pyarrow as pa
import pyarrow.parquet as pq
import pypdf
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from sft_play.data.formats import Body, Chat, Message, Pair, Text


@dataclass(frozen=True)
class Case:
    """One file: its name, its bytes, and what each row gives: a body, or the complaint without the row's beginning.

    A whole file's error comes last, as its full line.
    """

    said: str
    name: str
    content: bytes
    expected: tuple[str | Body, ...]


def case(said: str, name: str, content: bytes | str, *expected: str | Body) -> Case:
    return Case(said, name, content.encode() if isinstance(content, str) else content, expected)


GOOD = b'{"prompt": "a", "completion": "b"}'
PAIR = Pair(system="", user="a", plain_prompt="a", completion="b")
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def pair(prompt: str, completion: str) -> Pair:
    return Pair(system="", user=prompt, plain_prompt=prompt, completion=completion)


def chat(*turns: tuple[str, str] | Message) -> Chat:
    made = [one if isinstance(one, Message) else Message(role=one[0], content=one[1]) for one in turns]
    return Chat(messages=tuple(made))


def text(words: str) -> Text:
    return Text(text=words)


def row(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def turns(*messages: object) -> bytes:
    return row(messages=list(messages))


def spoken(*said: tuple[str, object]) -> bytes:
    return row(conversations=[{"from": speaker, "value": value} for speaker, value in said])


def lines(*rows: bytes) -> bytes:
    return b"\n".join(rows) + b"\n"


def parquet(*rows: dict[str, Any], compression: str = "snappy") -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), stream, compression=compression)
    return stream.getvalue()


def parquet_column(name: str, column: pa.Array, *more: pa.Array) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([column, *more], names=[name] * (1 + len(more))), stream)
    return stream.getvalue()


def word(*paragraphs: str, table: list[list[str]] | None = None) -> bytes:
    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    if table:
        made = document.add_table(rows=len(table), cols=len(table[0]))
        for cells, words in zip(made.rows, table, strict=True):
            for cell, one in zip(cells.cells, words, strict=True):
                cell.text = one
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


def zipped(**parts: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content in parts.items():
            packed.writestr(name, content)
    return stream.getvalue()


def pdf(*pages: str, password: str = "") -> bytes:
    writer = pypdf.PdfWriter()
    for words in pages:
        page = writer.add_blank_page(width=300, height=300)
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica", "/Encoding": "/WinAnsiEncoding"}
        made = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(made)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({words}) Tj ET".encode("cp1252") if words else b"")
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    made_file = io.BytesIO()
    writer.write(made_file)
    return made_file.getvalue()
