"""Put an adapter into its base: weight by weight from file to file, then checked by fresh processes.

The staging folder gets its name once the check has passed, so a folder of that name computes what was trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.errors import DiskFullError, ModelError
from sft_play.record.digests import sha256
from sft_play.record.manifest import sync_folder, write_manifest
from sft_play.record.results import MERGED
from sft_play.record.staging import staged
from sft_play.report.read import read_object
from sft_play.runtime.adapter_file import WEIGHTS, Adapter, read_adapter
from sft_play.runtime.model import DTYPES
from sft_play.runtime.shard_files import SHARD_BYTES, Piece, base_tensors, piece_of, read_tensor, write_shards

# Taken over from the adapter, where it has a tokenizer, else from the base.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
GENERATION = "generation_config.json"
# Beside the weights: tokenizer, index, card.
SMALL_FILES_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class MergeOrder:
    """What is merged.

    Attributes:
        dtype: bf16 or fp32; None keeps the type of each weight of the base.
        stamp: the run's; empty without one.
    """

    base: Path
    adapter: Path
    output: Path
    dtype: str | None
    trust_remote_code: bool
    stamp: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors to write, and what config.json has to say of them.

    Attributes:
        untied: whether the result needs an output matrix of its own, where its base shares the embedding.
    """

    pieces: tuple[Piece, ...]
    files: dict[str, Path]
    untied: bool
    vocab_size: int | None


def merge(order: MergeOrder, check: Callable[[Path], dict[str, Any]], write_card: Callable[[Path, Any], None]) -> Any:
    """Write the merged model; returns what `check` found.

    Args:
        check: told the staging folder, it raises where the result computes something else.
        write_card: writes the README.md of a folder, told what `check` found.

    Raises:
        ModelError: base or adapter cannot be merged, or do not fit each other.
        DiskFullError: the result would not fit.
        ResultDiffersError: from `check`.
    """
    refuse_base(order.base)
    adapter = read_adapter(order.adapter)
    layout = plan_tensors(order, adapter)
    with staged(order.output) as staging:
        staging.mkdir()
        check_disk(staging.parent, sum(piece.size_bytes for piece in layout.pieces) + SMALL_FILES_BYTES)
        write_shards(staging, layout.pieces, lambda piece: made(piece, adapter, layout.files), SHARD_BYTES)
        write_small_files(staging, order, layout)
        found = check(staging)
        write_card(staging, found)
        about = {"adapter": sha256(order.adapter / WEIGHTS), "dtype": order.dtype, "check": found}
        write_manifest(staging, {"stamp": order.stamp, MERGED: about})
        shutil.rmtree(order.output, ignore_errors=True)
        staging.rename(order.output)
    sync_folder(order.output.parent)
    return found


def refuse_base(base: Path) -> None:
    """Only whole numbers can take an adapter in.

    Raises:
        ModelError: the base is quantised.
    """
    settings = read_object(base / "config.json")
    quantized = settings.get("quantization_config") or settings.get("compression_config")
    if quantized:
        kind = quantized.get("quant_method", "quantised") if isinstance(quantized, dict) else "quantised"
        what = f"the base's weights are quantised ({kind}), and an adapter is merged into full precision only"
        raise ModelError(what, where=str(base / "config.json"), fix="name its 16-bit original with MODEL=")


def plan_tensors(order: MergeOrder, adapter: Adapter) -> Layout:
    """Every tensor of the result.

    Raises:
        ModelError: the adapter changes what the base's files do not hold.
    """
    files = base_tensors(order.base)
    pieces = {name: piece_of(name, file) for name, file in files.items()}
    embedding, head, tied = outer_weights(order.base, trust_remote_code=order.trust_remote_code)
    untied = False
    if tied and embedding in pieces:
        pieces.pop(head, None)  # a tied head in the file is not read
        shared = embedding in adapter.whole and embedding.removesuffix(".weight") not in saved_modules(adapter)
        if shared:
            drop_shared_head(adapter, embedding, head)
        elif adapter.changes(embedding) or adapter.changes(head):
            pieces[head] = replace(pieces[embedding], name=head)
            untied = True
    wanted = {*adapter.whole, *(f"{module}.weight" for module in adapter.lora)}
    if lacking := sorted(wanted - set(pieces)):
        fix = "name the base that the adapter was trained on with MODEL="
        raise ModelError(f"the base has no {lacking[0]}, which the adapter changes", where=str(order.base), fix=fix)
    rows = adapter.rows_of(embedding)
    return Layout(
        pieces=tuple(shaped(piece, adapter, order.dtype) for piece in pieces.values()),
        files=files,
        untied=untied,
        vocab_size=rows if embedding in pieces and rows != pieces[embedding].shape[0] else None,
    )


def shaped(piece: Piece, adapter: Adapter, dtype: str | None) -> Piece:
    """The piece with the type asked for, and the rows that added tokens gave it."""
    rows = adapter.rows_of(piece.name)
    shape = piece.shape if rows is None else (rows, *piece.shape[1:])
    return replace(piece, shape=shape, dtype=DTYPES[dtype] if dtype and piece.dtype.is_floating_point else piece.dtype)


def made(piece: Piece, adapter: Adapter, files: dict[str, Path]) -> torch.Tensor:
    """One tensor of the result, rounded once.

    Raises:
        ModelError: shapes do not fit, or it is not finite.
    """
    base = read_tensor(piece.source, files)
    result = adapter.applied(piece.name, base).to(piece.dtype)
    if result.is_floating_point() and not bool(torch.isfinite(result).all()):
        raise ModelError("is not finite once merged", where=piece.name, fix="merge in fp32: ARGS='--dtype fp32'")
    return result


def outer_weights(base: Path, *, trust_remote_code: bool) -> tuple[str, str, bool]:
    """Names of embedding and output matrix, and whether the model shares one for both.

    Raises:
        ModelError: transformers makes no model of its config.json.
    """
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, OSError, StrictDataclassError) as error:
        raise no_model(base, error) from error
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    if outside is None:
        return names[id(inside)], "", False
    return names[id(inside)], names[id(outside)], outside.weight is inside.weight


def no_model(folder: Path, error: Exception) -> ModelError:
    """What transformers says of a config.json that it makes no model of, in one line."""
    said = " ".join(str(error).split())[:160]
    return ModelError(f"transformers cannot use it ({said})", where=str(folder / "config.json"))


def saved_modules(adapter: Adapter) -> set[str]:
    """Modules that were trained as copies of their own, by the names of the file."""
    wanted = adapter.config.modules_to_save or ()
    modules = {weight.rpartition(".")[0] for weight in adapter.whole}
    return {module for module in modules if any(module == one or module.endswith(f".{one}") for one in wanted)}


def drop_shared_head(adapter: Adapter, embedding: str, head: str) -> None:
    """A resized embedding that the head shares stands in some files twice.

    Raises:
        ModelError: the two differ.
    """
    if head in adapter.whole:
        if not torch.equal(adapter.tensor(adapter.whole[head]), adapter.tensor(adapter.whole[embedding])):
            raise ModelError(f"{head} and {embedding} differ, and the base shares one", where=str(adapter.folder))
        del adapter.whole[head]


def write_small_files(folder: Path, order: MergeOrder, layout: Layout) -> None:
    """config.json, the tokenizer, the template and the generation config."""
    settings = read_object(order.base / "config.json")
    texts: dict[str, Any] = settings.get("text_config") or settings
    settings.pop("_name_or_path", None)  # where the base lay when it was saved
    if layout.untied:
        settings["tie_word_embeddings"] = texts["tie_word_embeddings"] = False
    if layout.vocab_size:
        texts["vocab_size"] = layout.vocab_size
    if order.dtype:
        for one in (settings, texts):
            one.pop("torch_dtype", None)
            one["dtype"] = str(DTYPES[order.dtype]).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    own = order.adapter if (order.adapter / "tokenizer.json").is_file() else order.base
    copies = [own / name for name in TOKENIZER_FILES]
    copies += [
        next(filter(Path.is_file, (place / GENERATION for place in (order.adapter, order.base))), own / GENERATION)
    ]
    copies += order.base.glob("*.py") if order.trust_remote_code else []
    for file in filter(Path.is_file, copies):
        shutil.copyfile(file, folder / file.name)


def check_disk(folder: Path, needed: int) -> None:
    """Refuse to begin what cannot be ended.

    Raises:
        DiskFullError: fewer bytes are free where `folder` lies.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"{needed / 2**30:,.1f} GiB are needed and {free / 2**30:,.1f} GiB are free"
        raise DiskFullError(what, where=str(folder.parent), fix="free space, or choose a place: ARGS='--output folder'")
