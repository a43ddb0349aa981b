"""Documents: one file, one row of text. Word files are read by python-docx, PDF by pypdf, each imported at need."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

from sft_play.data.bad_row import BadRow, beginning_of, shown_error
from sft_play.data.json_rows import RawRow
from sft_play.data.sources import DataFile
from sft_play.errors import DataError, EnvironmentProblem

UNPACKED_BYTES = 512 << 20
"""A Word file that unpacks to more is refused: text is never that large."""
_OLE = b"\xd0\xcf\x11\xe0"


def read_plain(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """A text or Markdown file as it stands, with line ends as `\\n`."""
    raw = stream.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        start = raw.rfind(b"\n", 0, error.start) + 1
        reason = f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start - start + 1}"
        begins = beginning_of(raw[start : start + 240].decode("utf-8", errors="backslashreplace"))
        yield BadRow(shown=file.shown, line=line, field="", reason=reason, beginning=begins)
        return
    yield 1, {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def read_docx(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """A Word file's paragraphs and tables in order, a line each; cells stand between tabs.

    Raises:
        DataError: the file is damaged, encrypted or of Word before 2007.
        EnvironmentProblem: python-docx is not installed.
    """
    raw = stream.read()
    if raw.startswith(_OLE):
        fix = "take the password off, or save it as .docx in Word or LibreOffice"
        raise DataError("the document is encrypted, or a .doc file of Word before 2007", where=file.shown, fix=fix)
    try:
        import docx
    except ImportError as error:
        raise _not_installed(file, "python-docx") from error
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as packed:
            unpacked = sum(part.file_size for part in packed.infolist())
        if unpacked > UNPACKED_BYTES:
            what = f"the document unpacks to {unpacked:,} bytes, more than {UNPACKED_BYTES:,}"
            raise DataError(what, where=file.shown, fix="split it, or save it as text")
        document = docx.Document(io.BytesIO(raw))
        text = "\n".join(_docx_lines(document.iter_inner_content()))
    except DataError:
        raise
    except Exception as error:  # a damaged file makes zipfile, lxml and python-docx raise errors of every kind
        raise _damaged(file, "Word", error) from error
    yield _text_row(file, text, "no text in the document")


def read_pdf(file: DataFile, stream: IO[bytes]) -> Iterator[RawRow | BadRow]:
    """A PDF's pages in order, a blank line between them.

    Raises:
        DataError: the file is damaged or encrypted.
        EnvironmentProblem: pypdf is not installed.
    """
    try:
        import pypdf
        import pypdf.errors
    except ImportError as error:
        raise _not_installed(file, "pypdf") from error
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it has to say about a file, it says on stderr
    encrypted = DataError("the PDF is encrypted", where=file.shown, fix="save it without a password")
    try:
        reader = pypdf.PdfReader(io.BytesIO(stream.read()))
        if reader.is_encrypted and not reader.decrypt(""):
            raise encrypted
        pages = [page.extract_text().strip() for page in reader.pages]
    except (DataError, MemoryError):
        raise
    except pypdf.errors.DependencyError as error:  # pypdf decrypts some kinds with a further package only
        raise encrypted from error
    except Exception as error:  # a damaged file makes pypdf raise errors of every kind
        raise _damaged(file, "PDF", error) from error
    text = "\n\n".join(page for page in pages if page)
    # Letters beyond 16 bits arrive as two halves; a half alone stands for nothing.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    yield _text_row(file, text, "no text in the PDF: its pages are pictures; run it through text recognition (OCR)")


def _docx_lines(blocks: Iterable[Any]) -> Iterator[str]:
    for block in blocks:
        if hasattr(block, "rows"):
            for row in block.rows:
                yield "\t".join(" ".join(_docx_lines(cell.iter_inner_content())) for cell in row.cells)
        else:
            yield block.text


def _text_row(file: DataFile, text: str, reason: str) -> RawRow | BadRow:
    if text.strip():
        return 1, {"text": text}
    return BadRow(shown=file.shown, line=1, field="", reason=reason, beginning="")


def _damaged(file: DataFile, kind: str, error: Exception) -> DataError:
    said = f" ({shown_error(error)})" if str(error) else ""
    return DataError(f"not a whole {kind} file{said}", where=file.shown, fix="save or fetch it again")


def _not_installed(file: DataFile, package: str) -> EnvironmentProblem:
    return EnvironmentProblem(f"the package {package} is not installed", where=file.shown)
