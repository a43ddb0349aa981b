"""Safetensors files read and written one tensor after the other: memory holds one tensor, not a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sft_play.errors import ModelError

SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
# Names of the format -> torch's.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {value: key for key, value in TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor to write.

    Attributes:
        source: the tensor of the base that it begins as.
    """

    name: str
    source: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


def base_tensors(folder: Path) -> dict[str, Path]:
    """Weight -> its file, in the order of the files.

    Raises:
        ModelError: there are only pickled weights, or none.
    """
    index = folder / INDEX
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in sorted(found.items(), key=lambda item: (item[1], item[0]))}
    files = sorted(
        file for file in folder.glob("*.safetensors") if not file.name.startswith(("consolidated", "adapter"))
    )
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        what = "the weights are pickled (pytorch_model.bin)" if pickled else "there are no weights (*.safetensors)"
        fix = "save the model anew with transformers' save_pretrained, which writes safetensors"
        raise ModelError(what, where=str(folder), fix=fix)
    tensors: dict[str, Path] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            tensors |= dict.fromkeys(opened.keys(), file)
    return tensors


def piece_of(name: str, file: Path) -> Piece:
    """A tensor as it lies in a file; only the header is read.

    Raises:
        ModelError: it is not there, or its type is one that is computed with by no CPU, such as 8-bit floats.
    """
    with safe_open(str(file), framework="pt") as opened:
        try:
            part = opened.get_slice(name)
        except SafetensorError as error:
            fix = "fetch the model anew: its index and its files differ"
            raise ModelError(f"{name} is not in it", where=str(file), fix=fix) from error
        kind = part.get_dtype()
        if kind not in TYPES:
            fix = "use the model's 16-bit weights"
            raise ModelError(f"{name} is of type {kind}, no full precision", where=str(file), fix=fix)
        return Piece(name=name, source=name, dtype=TYPES[kind], shape=tuple(part.get_shape()))


def read_tensor(name: str, files: dict[str, Path]) -> torch.Tensor:
    """One tensor of the base."""
    with safe_open(str(files[name]), framework="pt") as opened:
        return opened.get_tensor(name)


def write_shards(
    folder: Path, pieces: Sequence[Piece], make: Callable[[Piece], torch.Tensor], limit_bytes: int
) -> None:
    """Write `pieces` as one safetensors file, or as several of `limit_bytes` with their index.

    Args:
        make: called once a piece, in order; its result is written and dropped.

    Raises:
        OSError: the disk is full, or refuses.
    """
    shards = split_pieces(pieces, limit_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, make)
    if len(shards) > 1:
        where = {piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard}
        total = sum(piece.size_bytes for piece in pieces)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split_pieces(pieces: Sequence[Piece], limit_bytes: int) -> list[list[Piece]]:
    """Pieces in files of at most `limit_bytes`; a larger one has a file of its own."""
    shards: list[list[Piece]] = [[]]
    held = 0
    for piece in pieces:
        if shards[-1] and held + piece.size_bytes > limit_bytes:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += piece.size_bytes
    return shards


def _write_file(path: Path, pieces: Sequence[Piece], make: Callable[[Piece], torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        places = [offset, offset + piece.size_bytes]
        header[piece.name] = {"dtype": NAMES[piece.dtype], "shape": list(piece.shape), "data_offsets": places}
        offset = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for piece in pieces:
            tensor = make(piece)
            if tensor.dtype != piece.dtype or tuple(tensor.shape) != piece.shape:
                raise ModelError(f"became {tensor.dtype} {tuple(tensor.shape)}", where=f"{path.name}: {piece.name}")
            flat = tensor.contiguous().flatten().view(torch.uint8)
            stream.write(memoryview(flat.numpy()))
