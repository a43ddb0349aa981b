"""The report on data as lines to read: 80 columns, the same on a terminal and in a file but for colour."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from sft_play.data.bad_row import BadRow
from sft_play.data.examples import Example
from sft_play.data.mix import shares_of
from sft_play.data.report import RowReport, Same, SplitRows, formats_of
from sft_play.data.token_report import TokenReport, WouldPack
from sft_play.facts.data import DataFacts, DropReason, SourceFacts, SplitFacts

WIDTH = 80
_LABEL = 22
_BAR = 40
_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"
# From these shares on something is worth a word.
_MANY_CUT, _MANY_DOUBLES, _FEW_ENDS = 0.05, 0.05, 0.95

Row = tuple[str, Sequence[str]]


def row_lines(report: RowReport) -> Iterator[str]:
    """What the rows are like before any tokenizer."""
    if report.splits:
        yield from _table("rows", list(report.splits), _row_table(report.splits))
    if report.unused:
        yield f"  not used: {_safe(', '.join(report.unused))}"
    if report.bad:
        what = "a training refuses them" if report.policy == "error" else "they are left out"
        yield ""
        yield f"bad rows: {report.bad:,}, and {what} (data.on_bad_row: {report.policy})"
        yield from bad_row_lines(report.bad_rows, report.bad)
    for name, split in report.splits.items():
        yield from _same_lines(split.duplicates, f"of {name} say the same as an earlier one", "duplicates")
        if split.leaking:
            yield from _same_lines(split.leaking, f"of {name} are trained on too", "leaks")


def bad_row_lines(rows: Sequence[BadRow], total: int) -> Iterator[str]:
    """Each bad row with its place, its fault and its beginning; then how many are not listed."""
    for row in rows:
        field = f"{row.field}: " if row.field else ""
        yield _safe(f"  {row.shown}:{row.line}  {field}{row.reason}")
        if row.beginning:
            yield _safe(f"      {row.beginning}")
    if total > len(rows):
        yield f"  and {total - len(rows):,} more; ARGS='--limit {total}' lists them all"


def token_lines(report: TokenReport, *, colour: bool, rows_told: bool, limit: int = 20) -> Iterator[str]:
    """What the prepared data are like.

    Args:
        colour: mark what is learned by colour instead of brackets.
        rows_told: the rows' own faults, doubles and leaks stand above.
        limit: bad rows that are listed.
    """
    facts = report.facts
    yield from _table("tokens", list(facts.splits), _token_table(facts, rows_told=rows_told))
    if facts.unused_columns and not rows_told:
        yield f"  not used: {_safe(', '.join(facts.unused_columns))}"
    if report.bad_rows:
        yield ""
        yield f"bad rows{' found while tokenising' * rows_told}: {len(report.bad_rows):,}, left out"
        rows = [_reject(one) for one in report.bad_rows[:limit]]
        yield from bad_row_lines(rows, len(report.bad_rows))
    train = facts.splits["train"]
    if train.streamed:
        yield f"  train is streamed: its figures are those of the first {train.rows_read:,} rows"
    yield ""
    yield from _histogram(train, report.histogram)
    yield ""
    yield "packing"
    yield from (f"  {line}" for line in _packing(train, facts.max_seq_len, report.would_pack))
    if any(source.weight is not None for source in train.sources):
        yield ""
        yield from _mix(train.sources)
    if facts.proofs:
        yield ""
        yield "proved on a sample of the rows"
        for proof in facts.proofs:
            yield f"  {proof.name:<34} {proof.holds:,} of {proof.of:,}"
    if report.examples:
        yield ""
        yield f"{len(report.examples)} of the rows of train; what is learned is {'green' if colour else 'in [[ ]]'}"
    for example in report.examples:
        yield from _example(example, colour=colour, packed=train.packs is not None)
    warned = [f"  {line}" for line in cautions(facts)]
    if warned:
        yield from ("", "careful", *warned)


def cautions(facts: DataFacts) -> Iterator[str]:
    """What may be wrong with prepared data and is no error."""
    for name, split in facts.splits.items():
        if split.leaking:
            yield f"{split.leaking:,} rows of {name} are trained on too: its loss flatters"
    train = facts.splits["train"]
    whole = max(1, train.rows_read - train.dropped.get(DropReason.NOT_SAMPLED, 0))
    for count, what in (
        (train.truncated, f"cut at {facts.max_seq_len:,} tokens: how they end is not learned"),
        (train.dropped.get(DropReason.OVERLONG, 0), f"dropped: over {facts.max_seq_len:,} tokens"),
        (train.dropped.get(DropReason.BAD, 0), "left out: they are bad"),
        (train.dropped.get(DropReason.NOTHING_TO_LEARN, 0), "dropped: nothing in them is learned"),
    ):
        if count > _MANY_CUT * whole:
            yield f"{count / whole:.0%} of the rows are {what}"
    if train.duplicates > _MANY_DOUBLES * whole:
        yield f"{train.duplicates / whole:.0%} of the rows repeat an earlier one: they count more than once"
    if _has_turns(train) and train.end_of_turn_share < _FEW_ENDS:
        yield f"{1 - train.end_of_turn_share:.0%} of the rows lack a learned end of turn: the model may not stop"
    for proof in facts.proofs:
        if proof.holds < proof.of:
            yield f"{proof.name}: not for {proof.of - proof.holds:,} of {proof.of:,}: {proof.words}"


def _row_table(splits: Mapping[str, SplitRows]) -> Iterator[Row]:
    def each(value: Callable[[SplitRows], int | None]) -> list[str]:
        return [_count(value(split)) for split in splits.values()]

    yield "read", each(lambda split: split.read)
    for name in formats_of(splits):
        yield f"  {name}", [_count(split.formats.get(name, 0)) for split in splits.values()]
    yield "bad", each(lambda split: split.bad)
    yield "empty", each(lambda split: split.empty)
    yield "duplicates", each(lambda split: split.duplicates.count)
    if len(splits) > 1:
        yield "trained on too", each(lambda split: split.leaking.count if split.leaking else None)


def _token_table(facts: DataFacts, *, rows_told: bool) -> Iterator[Row]:
    splits = list(facts.splits.values())
    streamed = facts.splits["train"].streamed  # such rows are never all at hand, so nobody knows what equals what

    def each(label: str, value: Callable[[SplitFacts], int | None], *, always: bool = False) -> Iterator[Row]:
        values = [value(split) for split in splits]
        if always or any(values):
            yield label, [_count(one) for one in values]

    if not rows_told:
        yield from each("rows read", lambda split: split.rows_read, always=True)
        for name in dict.fromkeys(name for split in splits for name in split.formats):
            yield f"  {name}", [_count(split.formats.get(name, 0)) for split in splits]
    yield from each("rows kept", lambda split: split.rows_kept, always=True)
    for reason in DropReason:
        yield from each(f"dropped, {reason}", lambda split, reason=reason: split.dropped.get(reason, 0))  # type: ignore[misc]
    yield from each(f"cut at {facts.max_seq_len:,}", lambda split: split.truncated)
    yield from each("split up", lambda split: split.split_up)
    if not rows_told:
        yield from each("duplicates", lambda split: None if split.streamed else split.duplicates, always=True)
        if len(splits) > 1:
            yield from each("trained on too", lambda split: None if streamed else split.leaking, always=True)
    yield from each("tokens", lambda split: split.tokens, always=True)
    yield from each("  with loss", lambda split: split.loss_tokens, always=True)
    yield "  share of them", [f"{split.loss_tokens / max(1, split.tokens):.1%}" for split in splits]
    if any(_has_turns(split) for split in splits):
        yield (
            "end of turn learned",
            [f"{split.end_of_turn_share:.1%}" if _has_turns(split) else "-" for split in splits],
        )
    yield from each("longest row", lambda split: split.longest, always=True)


def _histogram(split: SplitFacts, bars: Sequence[tuple[int, int]]) -> Iterator[str]:
    yield "lengths of train, in tokens"
    most = max((count for _, count in bars), default=1)
    above = 0
    for bar, count in bars:
        end = min(bar, split.longest)
        reach = f"{above + 1:,} - {end:,}" if 0 < above < end - 1 else f"{'' if above else 'up to '}{end:,}"
        yield f"  {reach:>15} {count:>13,}  {'#' * -(-count * _BAR // most)}".rstrip()
        above = bar
    marks = [f"{p}% {length:,}" for p, length in split.percentiles.items()]
    yield f"  percentiles: {', '.join(marks)}"


def _packing(split: SplitFacts, limit: int, would: WouldPack | None) -> Iterator[str]:
    if split.packs is not None:
        yield f"{split.packs:,} sequences of {limit:,} tokens, {split.fill or 0:.1%} full"
    elif would is None:
        yield "decided while training"
    else:
        yield f"off: {would.together} rows padded to their longest are {would.padded_fill:.0%} full;"
        yield f"DATA_PACKING=true would make {would.packs:,} sequences of {limit:,}, {would.fill:.1%} full"


def _mix(sources: Sequence[SourceFacts]) -> Iterator[str]:
    total = max(1, sum(source.taken for source in sources))
    shares = shares_of([source.weight or 0.0 for source in sources])
    heads = ("rows", 12), ("taken", 12), ("times", 8), ("share", 9), ("wanted", 9)
    yield f"{'mix of train':<{_LABEL + 2}}" + "".join(f"{head:>{width}}" for head, width in heads)
    for source, wanted in zip(sources, shares, strict=True):
        path = _safe(source.path)
        path = path if len(path) <= _LABEL else "..." + path[3 - _LABEL :]
        times, share = source.taken / max(1, source.rows), source.taken / total
        yield f"  {path:<{_LABEL}}{source.rows:>12,}{source.taken:>12,}{times:>8.2f}{share:>9.1%}{wanted:>9.1%}"


def _same_lines(same: Same, what: str, head: str) -> Iterator[str]:
    if not same.count:
        return
    yield ""
    yield f"{head}: {same.count:,} rows {what}"
    for place, other in same.places:
        yield _safe(f"  {place} says the same as {other}")
    if same.count > len(same.places):
        yield f"  and {same.count - len(same.places):,} more"


def _example(example: Example, *, colour: bool, packed: bool) -> Iterator[str]:
    place = f"{example.number:,} of {example.of:,}"
    place = f"the first of pack {place}" if packed else f"row {place}"
    yield f"  {place}: {example.tokens:,} tokens, {example.loss_tokens:,} with loss"
    marked: list[tuple[str, bool]] = []
    for piece in example.pieces:
        text = _visible(piece.text)
        if piece.learned and not colour:
            text = f"[[{text}]]"
        marked += [(character, piece.learned) for character in text]
    for line in _wrapped(marked, WIDTH - 4):
        yield "    " + (_coloured(line) if colour else "".join(character for character, _ in line))


def _wrapped(text: Sequence[tuple[str, bool]], width: int) -> Iterator[Sequence[tuple[str, bool]]]:
    """Lines of marked characters, broken at line ends and, where they are too long, at blanks."""
    start = 0
    while start < len(text):
        shown = [character for character, _ in text[start : start + width + 1]]
        if "\n" in shown:
            end = start + shown.index("\n")
            yield text[start:end]
            start = end + 1
            continue
        end = start + width
        if len(shown) > width and " " in shown[width // 2 :]:
            end = start + len(shown) - shown[::-1].index(" ")
            yield text[start : end - 1]
        else:
            yield text[start:end]
        start = end


def _coloured(line: Sequence[tuple[str, bool]]) -> str:
    out, learned = [], False
    for character, is_learned in line:
        if is_learned is not learned:
            out.append(_GREEN if is_learned else _PLAIN)
            learned = is_learned
        out.append(character)
    return "".join(out) + (_PLAIN if learned else "")


def _visible(text: str) -> str:
    r"""Text of a row with its line ends written as \n, each at the end of a line, and nothing a terminal obeys."""
    return "".join("\\n\n" if one == "\n" else _safe(one) for one in text)


def _safe(text: str) -> str:
    """Text without anything that a terminal obeys."""
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def _reject(values: Mapping[str, object]) -> BadRow:
    return BadRow(
        shown=str(values["file"]),
        line=int(str(values["line"])),
        field=str(values["field"]),
        reason=str(values["reason"]),
        beginning=str(values["row"]),
    )


def _has_turns(split: SplitFacts) -> bool:
    return not set(split.formats) <= {"text"}


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _table(title: str, columns: Sequence[str], rows: Iterator[Row]) -> Iterator[str]:
    """A title over labels, and one column of figures a split."""
    yield f"{title:<{_LABEL + 2}}" + "".join(f"{name:>14}" for name in columns)
    for label, values in rows:
        yield f"  {label:<{_LABEL}}" + "".join(f"{value:>14}" for value in values)
