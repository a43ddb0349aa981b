"""One split while it is made: rows fitted to the length limit, written, mixed, packed and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.data.encode import Encoded
from sft_play.data.formats import Row
from sft_play.data.mask import RowRefused
from sft_play.data.mix import mix_rows
from sft_play.data.overlong import Fitter
from sft_play.data.pack import write_packs
from sft_play.data.sources import SourceFiles
from sft_play.data.validate import Rejects
from sft_play.data.write import Counts, SplitWriter, count_rows
from sft_play.errors import DataError
from sft_play.facts.data import DropReason, SourceFacts, SplitFacts, summarise_lengths


class Split:
    """A split of the prepared data.

    Args:
        file: the Arrow file to make; its stem is the split's name.
        sources: of the config; empty for a split that is carved from the training data.
        rejects, overlong: get the rows that cannot be used, and those that `on_overlong: error` refuses.

    Attributes:
        read, duplicates, leaking, dropped, formats: see `SplitFacts`.
    """

    def __init__(
        self, config: Config, file: Path, sources: Sequence[SourceFiles], rejects: Rejects, overlong: Rejects
    ) -> None:
        self.name, self._file, self._config, self._sources = file.stem, file, config, sources
        self._rejects = rejects
        self._fitter = Fitter(config, self.name, overlong)
        self._writer = SplitWriter(file)
        self.formats: Counter[str] = Counter()
        self.dropped = self._fitter.dropped
        self.read = self.duplicates = self.leaking = 0

    def write(self, rows: Sequence[tuple[Row, Encoded | RowRefused]]) -> None:
        """Append rows, each as the length policy leaves it."""
        fitted: list[Encoded] = []
        sources: list[int] = []
        for row, encoded in rows:
            if isinstance(encoded, RowRefused):
                self.refuse(row, encoded)
                continue
            pieces = self._fitter.fit(row, encoded)
            fitted += pieces
            sources += [row.file.source] * len(pieces)
        self._writer.write(fitted, sources)

    def refuse(self, row: Row, refused: RowRefused) -> None:
        """Count a row that cannot be rendered or masked."""
        self._rejects.add(self.name, row.bad(refused.field, refused.reason))
        self.dropped[DropReason.BAD] += 1

    def close(self) -> None:
        """Write what is still held; the file is whole only then."""
        rest = self._fitter.rest()
        self._writer.write(rest, [0] * len(rest))
        self._writer.close()

    def finish(self) -> tuple[SplitFacts, str]:
        """The facts and the digest of the closed split; the training rows are mixed and packed first.

        Raises:
            DataError: no row is left, or what is left trains a model that never stops.
        """
        data, training, rows_of = self._config.data, self.name == "train", None
        if training and (weights := weights_of(self._sources)):
            rows_of = self._mix(weights)
        counts = count_rows(self._file)
        if not counts.lengths:
            raise self._nothing_left()
        digest, packs, fill = counts.digest, None, None
        if training and data.packing:
            packs, fill = self._pack()
            digest += f" packed {self._config.model.max_seq_len} {self._config.train.seed}"
        facts = self._facts(counts, packs, fill, rows_of or counts.rows_of)
        _refuse_useless(self.name, facts)
        return facts, digest

    def _facts(self, counts: Counts, packs: int | None, fill: float | None, rows_of: Mapping[int, int]) -> SplitFacts:
        percentiles, histogram = summarise_lengths(counts.lengths)
        return SplitFacts(
            rows_read=self.read,
            rows_kept=len(counts.lengths),
            dropped={reason: self.dropped[reason] for reason in DropReason if self.dropped[reason]},
            truncated=self._fitter.truncated,
            tokens=sum(counts.lengths),
            loss_tokens=counts.loss_tokens,
            longest=max(counts.lengths),
            percentiles=percentiles,
            histogram=histogram,
            formats=dict(self.formats),
            end_of_turn_share=counts.closed / len(counts.lengths),
            split_up=self._fitter.split_up,
            duplicates=self.duplicates,
            leaking=self.leaking,
            sources=self._source_facts(counts, rows_of),
            packs=packs,
            fill=fill,
        )

    def _source_facts(self, counts: Counts, rows_of: Mapping[int, int]) -> tuple[SourceFacts, ...]:
        return tuple(
            SourceFacts(
                path=source.path,
                weight=source.weight if self.name == "train" else None,
                rows=rows_of.get(number, 0),
                taken=counts.rows_of.get(number, 0),
                tokens=counts.tokens_of.get(number, 0),
            )
            for number, source in enumerate(self._sources)
        )

    def _mix(self, weights: list[float]) -> dict[int, int]:
        names = [source.path for source in self._sources]
        mixed, limit, seed = self._file.with_suffix(".mixed"), self._config.data.max_rows, self._config.train.seed
        rows_of = mix_rows(self._file, mixed, weights=weights, names=names, limit=limit, seed=seed)
        mixed.replace(self._file)
        return rows_of

    def _pack(self) -> tuple[int, float]:
        packed = self._file.with_suffix(".packed")
        made = write_packs(self._file, packed, self._config.model.max_seq_len, self._config.train.seed)
        packed.replace(self._file)
        return made.packs, made.fill

    def _nothing_left(self) -> DataError:
        reasons = ", ".join(f"{self.dropped[reason]:,} {reason}" for reason in DropReason if self.dropped[reason])
        fix = "check that there are assistant turns to learn, data.loss_on and model.max_seq_len"
        what = f"no row is left to learn from, of {self.read:,} read: {reasons or 'none read'}"
        return DataError(what, where=f"data.{self.name}", fix=fix)


def weights_of(sources: Sequence[SourceFiles]) -> list[float]:
    """The weights of the sources; empty where they are put one after the other."""
    return [source.weight for source in sources if source.weight is not None]


def _refuse_useless(name: str, facts: SplitFacts) -> None:
    """Refuse what trains a model that never stops: no answer keeps its end."""
    if name != "train" or facts.end_of_turn_share > 0 or set(facts.formats) <= {"text"}:
        return
    what = f"no answer keeps its end-of-turn token within {facts.longest:,} tokens, so the model would never stop"
    raise DataError(what, where="data.train", fix="raise model.max_seq_len, or set data.on_overlong: drop")
