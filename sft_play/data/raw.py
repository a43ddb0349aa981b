"""From files to raw rows: one dictionary a row with its line, or the reason why there is none.

A raw row is `(line, {field: value})`. A row that cannot be read is a `BadRow` in its place and reading goes on
where the format allows it, so that one pass finds every fault of a file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import zstandard

from sft_play.data.bad_row import BadRow, beginning_of, shown_error, type_name
from sft_play.data.documents import read_docx, read_pdf, read_plain
from sft_play.data.json_rows import RawRow, read_json, read_jsonl
from sft_play.data.sources import Compression, DataFile, FileKind
from sft_play.data.tables import read_csv, read_parquet
from sft_play.errors import DataError

__all__ = ["BadRow", "RawRow", "beginning_of", "read_raw", "type_name"]

_READ_BYTES = 1 << 17
_PACKED_BYTES = 1 << 14
_UTF8_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_BINARY = (FileKind.DOCX, FileKind.PDF)
_READERS: dict[FileKind, Callable[[DataFile, IO[bytes]], Iterator[RawRow | BadRow]]] = {
    FileKind.JSONL: read_jsonl,
    FileKind.JSON: read_json,
    FileKind.CSV: read_csv,
    FileKind.TSV: read_csv,
    FileKind.TEXT: read_plain,
    FileKind.DOCX: read_docx,
    FileKind.PDF: read_pdf,
}


def read_raw(file: DataFile) -> Iterator[RawRow | BadRow]:
    """Rows of one file in order; lines count from 1, of Parquet files rows do.

    Raises:
        DataError: the file cannot be opened or its container is damaged.
        EnvironmentProblem: a package that its kind needs is not installed.
    """
    try:
        if file.kind is FileKind.PARQUET:
            yield from read_parquet(file)
        else:
            with _open(file) as stream:
                yield from _READERS[file.kind](file, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        packer = "zstd" if file.compression is Compression.ZSTD else "gzip"
        what = f"damaged {packer} file: {shown_error(error)}"
        raise DataError(what, where=file.shown, fix="fetch or pack the file again") from error
    except OSError as error:
        fix = "check that the file exists and that you may read it"
        raise DataError(f"cannot be read: {error.strerror or error}", where=file.shown, fix=fix) from error


def _open(file: DataFile) -> IO[bytes]:
    buffered = io.BufferedReader(_unpacked(file), buffer_size=_READ_BYTES)
    if file.kind in _BINARY:
        return buffered
    try:
        head = buffered.peek(4)[:4]
        wide = next((name for bom, name in _WIDE_BOMS.items() if head.startswith(bom)), "") or _wide_without_bom(head)
        if wide:
            raise DataError(f"the file is {wide}", where=file.shown, fix="save it as UTF-8")
        if head.startswith(_UTF8_BOM):
            buffered.read(len(_UTF8_BOM))
    except BaseException:
        buffered.close()
        raise
    return buffered


def _unpacked(file: DataFile) -> Any:
    if file.compression is Compression.GZIP:
        return gzip.open(file.path, "rb")
    stream = file.path.open("rb", buffering=0)
    return _ZstdStream(stream) if file.compression is Compression.ZSTD else stream


def _wide_without_bom(head: bytes) -> str:
    """No text begins with a NUL beside each letter."""
    zeros = tuple(byte == 0 for byte in head)
    return "UTF-16" if zeros in ((True, False, True, False), (False, True, False, True)) else ""


class _ZstdStream(io.RawIOBase):
    """Zstandard frames, one after another, as one stream; unlike the package's own reader it tells a cut-off one."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._chunks = _zstd_chunks(stream)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _zstd_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    frame: Any = None
    while packed := stream.read(_PACKED_BYTES):
        while packed:
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
    if frame is None or not frame.eof:
        raise EOFError("it ends too early")
