"""Tables, packed files and documents that are damaged, mislabelled or odd."""

from __future__ import annotations

import gzip

import pyarrow as pa
import zstandard

from tests.data.malformed.made import (
    GOOD,
    PAIR,
    Case,
    case,
    chat,
    lines,
    pair,
    parquet,
    parquet_column,
    pdf,
    text,
    word,
    zipped,
)

_ROWS = lines(*[GOOD] * 999)
_GZ = gzip.compress(_ROWS, mtime=0)
_ZST = zstandard.compress(_ROWS)
_PARQUET = parquet({"prompt": "a", "completion": "b"})
_DOCX = word("a")
_PDF = pdf("a")
_AGAIN = "-> write the file again"
_REFETCH = "-> fetch or pack the file again"
_RESAVE = "-> save or fetch it again"
_BAD_TEXT = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
)

TABLES: list[Case] = [
    case("an empty file", "r.csv", b""),
    case("blank lines only", "r.csv", b"\n\r\n\n"),
    case("a header only", "r.csv", b"prompt,completion\n"),
    case("blank lines before the header", "r.csv", b"\n\nprompt,completion\na,b\n", PAIR),
    case(
        "ragged rows",
        "r.csv",
        b"prompt,completion\na,b,c\na\na,b\n",
        "r.csv:2: 3 cells where the header has 2 columns",
        "r.csv:3: 1 cells where the header has 2 columns",
        PAIR,
    ),
    case(
        "a cell over two lines",
        "r.csv",
        b'prompt,completion\r\na,"b\r\nc"\r\nd,e,f\r\n',
        pair("a", "b\r\nc"),
        "r.csv:4: 3 cells where the header has 2 columns",
    ),
    case("an open quote", "r.csv", b'prompt,completion\na,b\n"a,b\n', PAIR, "r.csv:3: not CSV: unexpected end of data"),
    case(
        "text after a quote",
        "r.csv",
        b'prompt,completion\n"a"x,b\n',
        "r.csv:2: not CSV: ',' expected after '\"'",
    ),
    case(
        "an open quote in the header",
        "r.csv",
        b'"prompt',
        f"r.csv:1: the header is not CSV: unexpected end of data {_AGAIN}",
    ),
    case(
        "a column twice",
        "r.csv",
        b"prompt,prompt\na,b",
        "r.csv:1: a column name stands twice in the header -> rename one",
    ),
    case(
        "bad bytes in a cell",
        "r.csv",
        b"prompt,completion\na,b\n\xff,b\n",
        PAIR,
        "r.csv:3: prompt: not UTF-8 text at character 1",
    ),
    case(
        "bad bytes in the header", "r.csv", b"pr\xe4,b\n", "r.csv:1: the header is not UTF-8 -> save the file as UTF-8"
    ),
    case("a NUL in a cell", "r.csv", b"prompt,completion\na\0,b\n", pair("a\0", "b")),
    case("an empty cell", "r.csv", b"prompt,completion\na,\n", pair("a", "")),
    case(
        "semicolons",
        "r.csv",
        b"prompt;completion\na;b\n",
        "r.csv:1: the columns are separated by ; -> write it with commas (.csv) or tabs (.tsv)",
    ),
    case(
        "tabs in a .csv", "r.csv", b"prompt\tcompletion\n", "r.csv:1: the columns are separated by tabs -> name it .tsv"
    ),
    case(
        "commas in a .tsv",
        "r.tsv",
        b"prompt,completion\n",
        "r.tsv:1: the columns are separated by commas -> write it with commas (.csv) or tabs (.tsv)",
    ),
    case("a .tsv", "r.tsv", b"prompt\tcompletion\na,b\tc\n", pair("a,b", "c")),
    case(
        "turns that are no JSON",
        "r.csv",
        b'messages\n"[{""role"": "\n',
        "r.csv:2: messages: not JSON: expecting value at column 10",
    ),
    case("turns in a cell", "r.csv", b'messages\n"[{""role"": ""user"", ""content"": ""x""}]"\n', chat(("user", "x"))),
    case(
        "no Parquet",
        "r.parquet",
        b"junk",
        "r.parquet: not a whole Parquet file: Parquet file size is 4 bytes, smaller than the minimum file footer (8 bytes) -> write the file again",
    ),
    case(
        "an empty Parquet file",
        "r.parquet",
        b"",
        "r.parquet: not a whole Parquet file: Parquet file size is 0 bytes -> write the file again",
    ),
    case("a Parquet file cut off", "r.parquet", _PARQUET[:-20], "r.parquet: not a whole Parquet file: *"),
    case("a Parquet file without its start", "r.parquet", _PARQUET[20:], "r.parquet: not a whole Parquet file: *"),
    case(
        "numbers in Parquet",
        "r.parquet",
        parquet({"prompt": 1, "completion": "b"}),
        "r.parquet:1: prompt: text expected, found a number",
    ),
    case("bytes in Parquet", "r.parquet", parquet({"text": b"a"}), "r.parquet:1: text: text expected, found bytes"),
    case(
        "null in Parquet",
        "r.parquet",
        parquet({"text": "a"}, {"text": None}),
        text("a"),
        "r.parquet:2: text: text expected, found null",
    ),
    case("bad text in Parquet", "r.parquet", parquet_column("text", _BAD_TEXT), text("a"), "r.parquet:2: not UTF-8"),
    case(
        "a Parquet column twice",
        "r.parquet",
        parquet_column("text", pa.array(["a"]), pa.array(["b"])),
        "r.parquet: a column name stands twice -> rename one",
    ),
    case(
        "two formats in one Parquet file",
        "r.parquet",
        parquet({"text": None, "messages": [{"role": "user", "content": "x"}]}, {"text": "a", "messages": None}),
        chat(("user", "x")),
        "r.parquet:2: messages: a list of messages expected, found null; the row looks like text in a file of messages: put it into a file of its own",
    ),
]

PACKED: list[Case] = [
    case("no gzip", "r.jsonl.gz", b"junk", f"r.jsonl.gz: damaged gzip file: Not a gzipped file (b'ju') {_REFETCH}"),
    case(
        "rows named .gz", "r.jsonl.gz", GOOD, f"r.jsonl.gz: damaged gzip file: Not a gzipped file (b'{{\"') {_REFETCH}"
    ),
    case(
        "gzip cut off",
        "r.jsonl.gz",
        _GZ[:20],
        f"r.jsonl.gz: damaged gzip file: Compressed file ended before the end-of-stream marker was reached {_REFETCH}",
    ),
    case(
        "gzip with a wrong sum",
        "r.csv.gz",
        gzip.compress(b"text\na\n", mtime=0)[:-8] + bytes(8),
        "r.csv.gz: damaged gzip file: CRC check failed 0x0 != *",
    ),
    case("an empty gzip", "r.jsonl.gz", b""),
    case("gzip twice", "r.jsonl.gz", gzip.compress(GOOD + b"\n") + gzip.compress(GOOD), PAIR, PAIR),
    case(
        "no zstd",
        "r.jsonl.zst",
        b"junkjunk",
        "r.jsonl.zst: damaged zstd file: *",
    ),
    case(
        "gzip named .zst",
        "r.jsonl.zst",
        _GZ,
        "r.jsonl.zst: damaged zstd file: *",
    ),
    case("zstd cut off", "r.jsonl.zst", _ZST[:20], f"r.jsonl.zst: damaged zstd file: it ends too early {_REFETCH}"),
    case("an empty zstd", "r.jsonl.zst", b"", f"r.jsonl.zst: damaged zstd file: it ends too early {_REFETCH}"),
    case("zstd twice", "r.jsonl.zst", zstandard.compress(GOOD + b"\n") + zstandard.compress(GOOD), PAIR, PAIR),
    case(
        "UTF-16 in zstd",
        "r.json.zst",
        zstandard.compress("[]".encode("utf-16")),
        "r.json.zst: the file is UTF-16 -> save it as UTF-8",
    ),
]

DOCUMENTS: list[Case] = [
    case("a text", "r.txt", b"\xef\xbb\xbfa\r\nb\r", text("a\nb\n")),
    case("an empty text", "r.txt", b"", text("")),
    case("a text in latin-1", "r.md", "a\nbä".encode("latin-1"), "r.md:2: not UTF-8: byte 0xe4 at position 2"),
    case("a packed text", "r.txt.gz", gzip.compress(b"a"), text("a")),
    case("a Word file", "r.docx", word("a", "b", table=[["c", "d"]]), text("a\nb\nc\td")),
    case("an empty Word file", "r.docx", word(), "r.docx:1: no text in the document"),
    case("no Word file", "r.docx", b"junk", f"r.docx: not a whole Word file (File is not a zip file) {_RESAVE}"),
    case("a Word file cut off", "r.docx", _DOCX[:-200], "r.docx: not a whole Word file (*"),
    case("a zip that is no Word file", "r.docx", zipped(a="b"), "r.docx: not a whole Word file (*"),
    case(
        "an encrypted Word file",
        "r.docx",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100),
        "r.docx: the document is encrypted, or a .doc file of Word before 2007"
        " -> take the password off, or save it as .docx in Word or LibreOffice",
    ),
    case("a PDF", "r.pdf", pdf("a", "", "b"), text("a\n\nb")),
    case(
        "a PDF of pictures",
        "r.pdf",
        pdf("", ""),
        "r.pdf:1: no text in the PDF: its pages are pictures; run it through text recognition (OCR)",
    ),
    case("no PDF", "r.pdf", b"junk", "r.pdf: not a whole PDF file (*"),
    case("an empty PDF", "r.pdf", b"", "r.pdf: not a whole PDF file (*"),
    case("a PDF cut off", "r.pdf", _PDF[: len(_PDF) // 3], "r.pdf: not a whole PDF file (*"),
    case(
        "an encrypted PDF", "r.pdf", pdf("a", password="x"), "r.pdf: the PDF is encrypted -> save it without a password"
    ),
]
