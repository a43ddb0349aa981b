"""From the config's files to tokens and masks on disk, once, before any training process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.data.cache import Entry, finish_entry, key_of, key_parts, new_entry, read_entry, reason_of_miss
from sft_play.data.fingerprint import stream_fingerprint, written_after
from sft_play.data.formats import check_columns
from sft_play.data.mix import said_mix
from sft_play.data.preparation import Preparation, Say, SourcesBySplit, changed_while_read
from sft_play.data.proofs import prove, refuse_unproved
from sft_play.data.sources import given_sources, resolve_sources, stamps_of
from sft_play.data.stream import Stream, sample_facts
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import EnvironmentProblem
from sft_play.facts.data import DataFacts, SplitFacts


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tokenised data.

    Attributes:
        splits: `train`, and `validation` and `test` where there are any, each an Arrow IPC stream file: rows as
            `data.write.SCHEMA` has them, packed training rows as `data.pack` does.
        hit: whether it was in the cache already.
        rejects: rows that were skipped, one JSON object a line, where there are any.
        origins: what was read of the hub, each `owner/name@commit`.
        fingerprint_before: the data's fingerprint as earlier versions made it, where this one makes another.
    """

    splits: Mapping[str, Path]
    facts: DataFacts
    hit: bool
    rejects: Path | None
    origins: tuple[str, ...] = ()
    fingerprint_before: str = ""


def prepare(config: Config, tokenizer_dir: Path, cache_dir: Path, say: Say) -> Prepared:
    """Tokenise and mask the data of a config, or find it in the cache.

    Args:
        tokenizer_dir: the model's folder, with tokenizer.json.
        cache_dir: holds one folder a preparation; may be shared by runs.
        say: gets plain lines: hit or miss and why, progress, what was found.

    Raises:
        DataError: files, rows or the template are unusable, or nothing is left to learn; `SeveralErrors` for rows.
        ModelError: the tokenizer cannot be read.
        EnvironmentProblem: the cache cannot be written.
    """
    sources = _sources(config)
    fetched = [source for listed in sources.values() for source in listed if source.origin]
    for source in fetched:
        say(f"data: {source.path} is {source.origin}")
    origins = tuple(dict.fromkeys(source.origin for source in fetched))
    make = _prepare_stream if config.data.streaming else _prepare
    return replace(make(config, sources, tokenizer_dir, cache_dir, say), origins=origins)


def _prepare(config: Config, sources: SourcesBySplit, tokenizer_dir: Path, cache_dir: Path, say: Say) -> Prepared:
    as_found = stamps_of(sources)
    parts = key_parts(config, sources, tokenizer_dir)
    key = key_of(parts)
    if entry := read_entry(cache_dir, key):
        say(f"data: taken from the cache ({key[:8]}): same files, tokenizer, template and settings")
        _say_entry(entry, say)
        return _prepared(entry, hit=True)
    say(f"data: not in the cache ({reason_of_miss(cache_dir, key, parts)}); preparing")
    tokenizer = load_text_tokenizer(tokenizer_dir, config.model.chat_template)
    with new_entry(cache_dir) as folder:
        facts = Preparation(config, sources, tokenizer, folder, key, say).run()
        for name, one in stamps_of(sources).items():
            if one != as_found[name]:
                raise changed_while_read(name)
        entry = finish_entry(folder, cache_dir, key, parts, facts)
    _say_entry(entry, say)
    return _prepared(entry, hit=False)


def _prepare_stream(
    config: Config, sources: SourcesBySplit, tokenizer_dir: Path, cache_dir: Path, say: Say
) -> Prepared:
    """Look at the beginning of the training rows; held-out rows are tokenised now."""
    train = sources.pop("train")
    held = _prepare(config, sources, tokenizer_dir, cache_dir, say) if sources else None
    tokenizer = load_text_tokenizer(tokenizer_dir, config.model.chat_template)
    facts, rows = sample_facts(Stream(config, train, tokenizer), train)
    proofs = prove(tokenizer, rows, config.data.loss_on)
    refuse_unproved(proofs, tokenizer.template.where if tokenizer.template else str(tokenizer.folder))
    held_out = held.facts.fingerprint if held else ""
    now, before = (stream_fingerprint(config, train, ends_only=ends) + held_out for ends in (False, True))
    whole = DataFacts(
        key=held.facts.key if held else "",
        fingerprint=sha256(now.encode()).hexdigest(),
        max_seq_len=config.model.max_seq_len,
        splits={"train": facts, **(held.facts.splits if held else {})},
        unused_columns=held.facts.unused_columns if held else (),
        proofs=proofs,
    )
    say(f"data: train: streamed; the first {facts.rows_read:,} rows:")
    _say_facts(replace(whole, splits={"train": facts}), say)
    return Prepared(
        splits=held.splits if held else {},
        facts=whole,
        hit=False,
        rejects=held.rejects if held else None,
        fingerprint_before="" if now == before else sha256(before.encode()).hexdigest(),
    )


def prepare_held_out(config: Config, tokenizer_dir: Path, cache_dir: Path, say: Say) -> Prepared:
    """Tokenise the held-out rows of a config and leave its training rows alone.

    Raises:
        DataError, ModelError, EnvironmentProblem: as `prepare`.
    """
    sources = {name: found for name, found in _sources(config).items() if name != "train"}
    return _prepare(config, sources, tokenizer_dir, cache_dir, say)


def streamed_after(config: Config, seconds: float) -> list[str]:
    """Streamed files that were written after a time (seconds since 1970), of which their parts may not tell.

    Raises:
        DataError, EnvironmentProblem: as `prepare`.
    """
    return written_after(_sources(config)["train"], seconds) if config.data.streaming else []


def open_stream(config: Config, tokenizer_dir: Path) -> Stream:
    """The training rows of a config under `data.streaming`.

    Raises:
        DataError: as `prepare`.
    """
    tokenizer = load_text_tokenizer(tokenizer_dir, config.model.chat_template)
    return Stream(config, _sources(config)["train"], tokenizer)


def read_cached_facts(config: Config, tokenizer_dir: Path, cache_dir: Path) -> DataFacts | None:
    """The facts of an earlier preparation of just this data, for planning; None where there is none.

    Raises:
        DataError: the files that the config names are not there.
    """
    if config.data.streaming:
        return None
    try:
        sources = _sources(config, fetch=False)
    except EnvironmentProblem:  # a hub id that nobody has fetched yet
        return None
    entry = read_entry(cache_dir, key_of(key_parts(config, sources, tokenizer_dir)))
    return None if entry is None else entry.facts


def _sources(config: Config, *, fetch: bool = True) -> SourcesBySplit:
    check_columns(config.data.columns)
    return {
        name: resolve_sources(one, key=f"data.{name}", default_format=config.data.format, fetch=fetch)
        for name, one in given_sources(config).items()
    }


def _prepared(entry: Entry, *, hit: bool) -> Prepared:
    return Prepared(splits=entry.splits, facts=entry.facts, hit=hit, rejects=entry.rejects)


def _say_entry(entry: Entry, say: Say) -> None:
    _say_facts(entry.facts, say)
    if entry.rejects:
        say(f"data: the bad rows stand in {entry.rejects}")


def _say_facts(facts: DataFacts, say: Say) -> None:
    for name, split in facts.splits.items():
        for line in _said(split, facts.max_seq_len):
            say(f"data: {name}: {line}")
    for name, count in facts.unwritten.items():
        say(f"data: careful: the chat template leaves out {name} of {count:,} messages")
    for proof in facts.proofs:
        if proof.holds < proof.of:
            say(f"data: careful: {proof.name}: {proof.of - proof.holds:,} of {proof.of:,} not: {proof.words}")


def _said(split: SplitFacts, limit: int) -> list[str]:
    share = split.loss_tokens / split.tokens if split.tokens else 0.0
    line = f"{split.rows_kept:,} rows, {split.tokens:,} tokens, {share:.0%} with loss, longest {split.longest:,}"
    line += f", {split.truncated:,} truncated to {limit:,}" if split.truncated else ""
    line += f", {split.split_up:,} split up" if split.split_up else ""
    line += "".join(f", {count:,} dropped ({reason})" for reason, count in split.dropped.items())
    lines = [line]
    if split.packs is not None:
        lines.append(f"packed into {split.packs:,} sequences of {limit:,} tokens, {split.fill or 0:.1%} full")
    if any(source.weight is not None for source in split.sources):
        lines.append("mix: " + said_mix({source.path: (source.rows, source.taken) for source in split.sources}))
    if split.duplicates:
        lines.append(f"{split.duplicates:,} rows say the same as an earlier one")
    if split.leaking:
        lines.append(f"careful: {split.leaking:,} rows stand in the training data too, so their figures flatter")
    return lines
