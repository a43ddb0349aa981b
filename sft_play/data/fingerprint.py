"""What a stream's files are known by, without reading all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.data.sources import SourceFiles

END_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16
FILE_BLOCKS = 64
"""Blocks between the ends of one file: up to 6 MiB it is seen whole."""
ALL_BLOCKS = 4096
"""Blocks of all files together, as far as `LEAST_BLOCKS` of each allow: many files are not to take minutes."""
LEAST_BLOCKS = 4


def stream_fingerprint(config: Config, sources: Sequence[SourceFiles], *, ends_only: bool = False) -> str:
    """Hash of what decides the stream, as far as it can be told without reading all of it.

    Sizes, the first and last MiB of each file and blocks evenly between them; files up to 6 MiB whole, where there are
    no more than 64 of them.

    Args:
        ends_only: leave the blocks out, as earlier versions did.
    """
    settings = config.data.model_dump(include={"task", "format", "columns", "loss_on", "on_bad_row", "on_overlong"})
    settings |= {"packing": config.data.packing, "cross_documents": config.data.cross_documents}
    digest = sha256(json.dumps([settings, config.train.seed, config.model.max_seq_len], sort_keys=True).encode())
    blocks = 0 if ends_only else blocks_of(sum(len(source.files) for source in sources))
    for source in sources:
        digest.update(f"{source.weight} {source.max_rows}\n".encode())
        for file in source.files:
            digest.update(f"{file.kind} {file.format} {file.path.stat().st_size}\n".encode())
            for part in sample(file.path, blocks):
                digest.update(part)
    return digest.hexdigest()


def blocks_of(files: int) -> int:
    """Blocks that are read of each of so many files."""
    return min(FILE_BLOCKS, max(LEAST_BLOCKS, ALL_BLOCKS // max(1, files)))


def sample(path: Path, blocks: int) -> Iterator[bytes]:
    """The first and last MiB of a file, then blocks of 64 KiB evenly between them where it has more."""
    size = path.stat().st_size
    between = size - 2 * END_BYTES
    with path.open("rb") as stream:
        yield stream.read(END_BYTES)
        stream.seek(max(0, size - END_BYTES))
        yield stream.read(END_BYTES)
        for number in range(blocks if between > 0 else 0):
            stream.seek(END_BYTES + max(0, between - BLOCK_BYTES) * number // (blocks - 1))
            yield stream.read(BLOCK_BYTES)


def written_after(sources: Sequence[SourceFiles], seconds: float) -> list[str]:
    """Files that were written after a time (seconds since 1970); what a hub keeps under a commit does not change."""
    files = [file for source in sources if not source.origin for file in source.files]
    return [file.shown for file in files if file.path.stat().st_mtime > seconds]
