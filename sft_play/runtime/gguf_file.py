"""Write a model folder as one GGUF file, tensor by tensor, and compare what was written with its source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from sft_play.errors import ModelError, ResultDiffersError
from sft_play.runtime.gguf_vocabulary import CONVERTER, read_vocabulary
from sft_play.runtime.merge import no_model, refuse_base
from sft_play.runtime.shard_files import base_tensors, piece_of, read_tensor

# Family -> llama.cpp's name of its architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Type -> of the file, and of its matrices.
KINDS = {
    "f32": (LlamaFileType.ALL_F32, GGMLQuantizationType.F32),
    "f16": (LlamaFileType.MOSTLY_F16, GGMLQuantizationType.F16),
    "bf16": (LlamaFileType.MOSTLY_BF16, GGMLQuantizationType.BF16),
    "q8_0": (LlamaFileType.MOSTLY_Q8_0, GGMLQuantizationType.Q8_0),
}
LARGEST_F16 = 65504.0
# q8_0 keeps 32 numbers as whole multiples of a scale, which is kept in 16 bits: half a step, and the scale's rounding
# times 127. A scale near 0 is rounded to multiples of 2^-24.
Q8_STEPS, Q8_SMALLEST = 0.57, 127 * 2.0**-25
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model folder, and what its tensors are called in the file.

    Attributes:
        names: tensor of the folder -> of the file.
        heads: of queries and of keys.
    """

    folder: Path
    config: Any
    architecture: str
    names: dict[str, str]
    files: dict[str, Path]

    def array(self, name: str) -> np.ndarray:
        """One tensor in fp32, its rows in the order that llama.cpp wants."""
        array: np.ndarray = read_tensor(name, self.files).float().numpy()
        found = re.search(r"\.([qk])_proj\.", name)
        if self.architecture != "llama" or not found:
            return array
        heads = self.config.num_attention_heads if found[1] == "q" else self.config.num_key_value_heads
        return interleaved(array, heads)


def write_gguf(folder: Path, target: Path, kind: str, title: str) -> None:
    """Write `target`.

    Args:
        kind: f32, f16, bf16 or q8_0.
        title: name of the model, for `general.name`.

    Raises:
        ModelError: the family, the tokenizer or a tensor is one that is not understood here.
    """
    source = read_source(folder)
    writer = GGUFWriter(target, source.architecture)
    rows = piece_of(embedding_of(source), source.files[embedding_of(source)]).shape[0]
    add_settings(writer, source.config, rows, title)
    writer.add_file_type(int(KINDS[kind][0]))
    if kind == "q8_0":
        writer.add_quantization_version(2)
    read_vocabulary(folder, rows).write(writer)
    factors = rope_factors(source.config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for name, renamed in source.names.items():
        shape = piece_of(name, source.files[name]).shape
        type_ = type_of(shape, kind)
        block, size = GGML_QUANT_SIZES[type_]
        writer.add_tensor_info(renamed, shape, np.dtype(np.float32), math.prod(shape) // block * size, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name in source.names:
        array = source.array(name)
        writer.write_tensor_data(packed(array, type_of(array.shape, kind), name))
    writer.close()


def size_of_gguf(folder: Path, kind: str) -> int:
    """Bytes of the tensors, and some for the vocabulary."""
    source = read_source(folder)
    total = 32 * 2**20
    for name in source.names:
        shape = piece_of(name, source.files[name]).shape
        block, size = GGML_QUANT_SIZES[type_of(shape, kind)]
        total += math.prod(shape) // block * size
    return total


def read_source(folder: Path) -> Source:
    """The model of a folder.

    Raises:
        ModelError: its family, an option or a tensor has no place in the file.
    """
    refuse_base(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, OSError, StrictDataclassError) as error:
        raise no_model(folder, error) from error
    where = str(folder / "config.json")
    if config.model_type not in ARCHITECTURES:
        what = f"the family {config.model_type} is not written as GGUF here, only {', '.join(ARCHITECTURES)}"
        raise ModelError(what, where=where, fix=CONVERTER)
    if config.model_type != "mistral" and getattr(config, "use_sliding_window", False):
        raise ModelError("a sliding window has no place in the file", where=where, fix=CONVERTER)
    architecture = ARCHITECTURES[config.model_type]
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    files = base_tensors(folder)
    names = {}
    for name in files:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        renamed = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise ModelError(
                f"the tensor {name} has no place in a {architecture} file", where=str(folder), fix=CONVERTER
            )
        names[name] = renamed
    return Source(folder=folder, config=config, architecture=architecture, names=names, files=files)


def embedding_of(source: Source) -> str:
    """The tensor of the input embedding.

    Raises:
        ModelError: there is none.
    """
    for name, renamed in source.names.items():
        if renamed == "token_embd.weight":
            return name
    raise ModelError("there is no input embedding", where=str(source.folder))


def add_settings(writer: GGUFWriter, config: Any, rows: int, title: str) -> None:
    """Shape, positions and norms.

    Raises:
        ModelError: the way positions are scaled is not understood here.
    """
    writer.add_type("model")
    writer.add_name(title)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    positions = config.max_position_embeddings
    writer.add_context_length(min(positions, window) if window else positions)  # beyond it llama.cpp sees all of it
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(rows)
    writer.add_rope_dimension_count(width)
    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(int(rope.get("original_max_position_embeddings") or positions))


def rope_of(config: Any) -> Mapping[str, Any]:
    """How positions turn queries and keys.

    Raises:
        ModelError: in a way that is not understood here.
    """
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    if kind not in ("default", "linear", "yarn", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"positions of kind {kind} are not written here", where="config.json: rope", fix=CONVERTER)
    return rope


def rope_factors(config: Any) -> np.ndarray | None:
    """What Llama 3.1 and later divide frequencies by: 1 for short waves, `factor` for long ones, a ramp between."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, width, 2) / width)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) / waves
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - ramp) / float(rope["factor"]) + ramp)).astype(np.float32)


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys with the two halves of each head in turn, as llama.cpp rotates them."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def type_of(shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    """Vectors stay fp32; rows that cannot be cut into blocks are kept in 16 bits."""
    wanted = KINDS[kind][1]
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    return wanted if shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0 else GGMLQuantizationType.F16


def packed(array: np.ndarray, type_: GGMLQuantizationType, name: str) -> np.ndarray:
    """A tensor as bytes of its type.

    Raises:
        ModelError: a number is too large for it.
    """
    if type_ == GGMLQuantizationType.F16 and float(np.abs(array).max(initial=0.0)) > LARGEST_F16:
        raise ModelError("has numbers beyond what f16 holds", where=name, fix="ARGS='--type bf16'")
    result: np.ndarray = quants.quantize(array, type_)
    return result


def check_gguf(folder: Path, target: Path) -> dict[str, Any]:
    """Read a file back and compare every tensor with its source.

    Raises:
        ResultDiffersError: one is missing, has another shape, or differs by more than its type explains.
    """
    source = read_source(folder)
    read = {tensor.name: tensor for tensor in GGUFReader(target).tensors}
    missing = sorted(set(source.names.values()) - set(read))
    strange = sorted(set(read) - set(source.names.values()) - {ROPE_FACTORS})
    if missing or strange:
        raise ResultDiffersError(f"tensors missing {missing[:3]} or unknown {strange[:3]}", where=str(target))
    types: dict[str, int] = {}
    worst = 0.0
    for name, array, back, type_ in compared(source, read):
        types[type_.name.lower()] = types.get(type_.name.lower(), 0) + 1
        wanted, room = expected(array, type_)
        if back.shape != array.shape or not bool(np.all(np.abs(back - wanted) <= room)):
            raise ResultDiffersError(f"{name} is not what was written", where=str(target))
        worst = max(worst, float(np.abs(back - array).max(initial=0.0)))
    return {"tensors": sum(types.values()), "types": types, "largest": worst}


def compared(
    source: Source, read: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, GGMLQuantizationType]]:
    """Of each tensor its name, what it was, what the file gives back, and its type there."""
    for name, renamed in source.names.items():
        tensor = read[renamed]
        back = quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(length) for length in reversed(tensor.shape))
        yield renamed, source.array(name), back.reshape(shape), tensor.tensor_type


def expected(array: np.ndarray, type_: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray | float]:
    """What a tensor is in its type, and by how much the file may differ from that: by nothing, unless in blocks."""
    if type_ == GGMLQuantizationType.F16:
        return array.astype(np.float16).astype(np.float32), 0.0
    if type_ == GGMLQuantizationType.BF16:
        return torch.from_numpy(array).to(torch.bfloat16).float().numpy(), 0.0
    if type_ == GGMLQuantizationType.Q8_0:
        blocks = np.abs(array.reshape(-1, GGML_QUANT_SIZES[type_][0]))
        room = blocks.max(axis=1, keepdims=True) / 127 * Q8_STEPS + Q8_SMALLEST
        return array, np.broadcast_to(room, blocks.shape).reshape(array.shape)
    return array, 0.0
