"""The stream of training rows as a data set that the loader's worker reads ahead of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import IterableDataset

from sft_play.config.schema import Config
from sft_play.data.prepare import open_stream
from sft_play.data.stream_index import StreamIndex
from sft_play.errors import DataError, SeveralErrors, SftPlayError

_MARK = "stream failed: "


@dataclass(frozen=True, kw_only=True)
class StreamPlace:
    """Where a rank's stream begins.

    Attributes:
        folder: of the run; keeps what the windows held.
        skip: sequences that the run has trained on.
        keep: this rank writes the index.
    """

    config: Config
    model_path: Path
    folder: Path
    skip: int
    keep: bool


class StreamFailed(Exception):
    """Rows that cannot be used were met while training; its text survives the way out of the loader's process."""

    @classmethod
    def because(cls, error: SftPlayError) -> StreamFailed:
        """Written so that `user_error` reads it back."""
        several = error.errors if isinstance(error, SeveralErrors) else [error]
        return cls(_MARK + json.dumps([[one.what, one.where, one.fix] for one in several]))

    def user_error(self) -> SftPlayError:
        """The error as the run reports it."""
        text = str(self)
        told, _ = json.JSONDecoder().raw_decode(text, text.rindex(_MARK) + len(_MARK))
        return SeveralErrors([DataError(what, where=where, fix=fix) for what, where, fix in told])


def stream_dataset(place: StreamPlace) -> IterableDataset:
    """Sequences (input_ids, labels; lengths of packs) from the place on, without end."""
    return IterableDataset.from_generator(_sequences, gen_kwargs={"place": place})


def _sequences(place: StreamPlace) -> Iterator[dict[str, Any]]:
    try:
        stream = open_stream(place.config, place.model_path)
        yield from stream.sequences(place.skip, StreamIndex(place.folder), keep=place.keep)
    except SftPlayError as error:
        raise StreamFailed.because(error) from error
