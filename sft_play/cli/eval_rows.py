"""The rows of `make eval`: a run's own split, or DATA, prepared as a training would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, SplitSection
from sft_play.errors import DataError, UsageError
from sft_play.facts.model import read_model_facts

SPLITS = ("validation", "test", "train")
MAX_SEQ_LEN = 2048

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rows:
    """Prepared rows on disk.

    Attributes:
        name: of the split, or the stem of DATA.
        sources: what the rows came from, by number.
    """

    name: str
    file: Path
    sources: tuple[str, ...]


def rows_of_run(job: Any, wanted: str | None, say: Say) -> Rows:
    """A split of a run, from the token cache; prepared anew where it is gone, or lies there packed.

    Raises:
        UsageError: no such split.
        DataError: the run has none of this name, or its files are gone.
    """
    config: Config = job.config
    if wanted is not None and wanted not in SPLITS:
        raise UsageError(f"no split {wanted!r}", where="SPLIT", fix=f"use {', '.join(SPLITS)}")
    there = [name for name in SPLITS if name in job.splits and not (name == "train" and config.data.streaming)]
    held_out = [name for name in there if name != "train"]
    if wanted is None and not held_out:
        fix = "SPLIT=train, or DATA=file of other rows"
        raise DataError("the run held no rows back", where=str(job.run.path), fix=fix)
    name = wanted or held_out[0]
    if name not in there:
        fix = f"it has {' and '.join(there) or 'none'}; DATA=file takes other rows"
        raise DataError(f"the run has no prepared {name} rows", where="SPLIT", fix=fix)
    names = _source_names(config, name)
    if job.splits[name].is_file() and not (name == "train" and config.data.packing):
        return Rows(name, job.splits[name], names)
    from sft_play.data.prepare import prepare

    unpacked = _with_data(config, packing=False)
    prepared = prepare(unpacked, job.model_path, Path(config.run.output_dir) / ".cache" / "tokens", say)
    return Rows(name, prepared.splits[name], names)


def rows_of_data(config: Config, data: str, tokenizer: Path, say: Say) -> Rows:
    """The rows of DATA, read as the config says: format, columns, what carries loss, the longest row.

    Raises:
        DataError: as a training's preparation.
    """
    from sft_play.data.prepare import prepare_held_out

    none = {"validation": None, "split": SplitSection(), "packing": False, "streaming": False, "max_rows": None}
    alone = _with_data(config, train=data, test=data, **none)
    prepared = prepare_held_out(alone, tokenizer, Path(config.run.output_dir) / ".cache" / "tokens", say)
    return Rows(Path(data).name.partition(".")[0] or "data", prepared.splits["test"], ())


def config_of_model(model: str, folder: Path, data: str) -> Config:
    """A config of defaults for a model without a run; rows no longer than it has positions."""
    positions = read_model_facts(str(folder)).max_positions
    limit = min(positions, MAX_SEQ_LEN) if positions else MAX_SEQ_LEN
    return Config.model_validate({"model": {"name": model, "max_seq_len": limit}, "data": {"train": data}})


def _source_names(config: Config, split: str) -> tuple[str, ...]:
    """Number and stem of each source, as a training names them; of carved rows those of the training data."""
    from sft_play.runtime.evaluation import source_names

    return source_names(config, split)


def _with_data(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})
