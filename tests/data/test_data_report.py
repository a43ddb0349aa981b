"""The report on data: places of doubles and leaks, what packing would give, examples as text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from sft_play.data.examples import PIECE_CHARACTERS, Example, Piece, pieces_of, read_examples
from sft_play.data.report import PLACES_SHOWN, check_rows
from sft_play.data.report_text import cautions, row_lines, token_lines
from sft_play.data.template import load_text_tokenizer
from sft_play.data.token_report import bars_of, make_token_report
from sft_play.errors import SeveralErrors
from sft_play.facts.data import DataFacts, Proof, SplitFacts, summarise_lengths
from tests.data.test_data_prepare import Bench
from tests.data.tokenizers_made import STYLES


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "completion": f"answer {number}"}


def split_facts(lengths: list[int], **more: Any) -> SplitFacts:
    percentiles, histogram = summarise_lengths(lengths)
    values: dict[str, Any] = {
        "rows_read": len(lengths), "rows_kept": len(lengths), "dropped": {}, "truncated": 0, "tokens": sum(lengths),
        "loss_tokens": sum(lengths) // 2, "longest": max(lengths), "percentiles": percentiles, "histogram": histogram,
        "formats": {"messages": len(lengths)}, "end_of_turn_share": 1.0,
    }  # fmt: skip
    return SplitFacts(**values | more)


def facts_of(*splits: SplitFacts, **more: Any) -> DataFacts:
    names = ("train", "validation", "test")
    return DataFacts(key="k", fingerprint="f", max_seq_len=64, splits=dict(zip(names, splits, strict=False)), **more)


def test_the_first_places_of_doubles_and_their_number(bench: Bench) -> None:
    bench.write(pair(0), pair(1), *[pair(1)] * 4, *[pair(0)] * 4)
    report = check_rows(bench.config(), 10)
    same = report.splits["train"].duplicates
    assert same.count == 8
    assert [place.rpartition(":")[2] for place, _ in same.places] == ["3", "4", "5", "6", "7"]
    assert [place.rpartition(":")[2] for _, place in same.places] == ["2", "2", "2", "2", "1"]
    assert len(same.places) == PLACES_SHOWN
    assert f"  and {8 - PLACES_SHOWN} more" in list(row_lines(report))
    assert report.refusal() is None


def test_leaks_are_counted_from_the_rows_that_are_trained_on(bench: Bench) -> None:
    bench.rows(40)
    held = bench.write(*(pair(n) for n in range(30, 50)), name="held.jsonl")
    report = check_rows(bench.config(validation=str(held)), 10)
    leaks = report.splits["validation"].leaking
    assert leaks is not None
    assert leaks.count == 10
    assert leaks.places[0] == (f"{held}:1", f"{bench.train}:31")
    sampled = check_rows(bench.config(validation=str(held), max_rows=8), 10).splits["validation"].leaking
    prepared = bench.prepare(validation=str(held), max_rows=8)
    assert sampled is not None
    assert sampled.count == prepared.facts.splits["validation"].leaking < 8


def test_the_counts_are_those_of_the_preparation(bench: Bench) -> None:
    bench.write(pair(1), pair(2), pair(1), {"prompt": "x", "completion": " "}, {"prompt": 1}, {"prompt": "y"})
    report = check_rows(bench.config(on_bad_row="skip"), 1)
    facts = bench.prepare(on_bad_row="skip").facts.splits["train"]
    train = report.splits["train"]
    assert (train.read, train.bad, train.empty, train.duplicates.count) == (6, 2, 1, 1)
    assert (facts.rows_read, facts.dropped["bad"], facts.dropped["empty"], facts.duplicates) == (6, 2, 1, 1)
    assert train.formats == {"prompt_completion": 4}
    assert (len(report.bad_rows), report.bad) == (1, 2)
    assert report.refusal() is None


def test_a_file_that_cannot_be_read_does_not_hide_the_others(bench: Bench) -> None:
    bench.rows(3)
    whole = gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 3000)
    (bench.folder / "held.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    bench.write(pair(1), {"prompt": 1}, name="test.jsonl")
    config = bench.config(validation=str(bench.folder / "held.jsonl.gz"), test=str(bench.folder / "test.jsonl"))
    report = check_rows(config, 10)
    assert list(report.splits) == ["train", "test"]
    assert report.bad == 1
    refusal = report.refusal()
    assert refusal is not None
    damaged, bad = refusal.lines()
    assert "held.jsonl.gz: damaged gzip file" in damaged
    assert bad.startswith("data: 1 bad row of 5")


def test_all_missing_files_are_named_together(bench: Bench) -> None:
    with pytest.raises(SeveralErrors) as caught:
        check_rows(bench.config(validation="nowhere/v.jsonl"), 10)
    assert [line.split(":")[0] for line in caught.value.lines()] == ["data.train", "data.validation"]


def test_what_packing_would_give_is_what_it_gives(bench: Bench) -> None:
    bench.rows(400)
    off = make_token_report(bench.config(), bench.prepare(), bench.tokenizer)
    packed_config = bench.config(packing=True)
    packed = make_token_report(packed_config, bench.prepare(packed_config), bench.tokenizer)
    train = packed.facts.splits["train"]
    assert off.would_pack is not None
    assert packed.would_pack is None
    assert off.would_pack.packs == train.packs
    assert off.would_pack.fill == pytest.approx(train.fill)
    assert 0.5 < off.would_pack.padded_fill <= 1
    assert packed.histogram == off.histogram
    assert sum(count for _, count in off.histogram) == 400
    for report in (off, packed):
        lines = list(token_lines(report, colour=False, rows_told=False))
        assert (
            f"    [[answer {report.examples[0].pieces[1].text.split()[1].removesuffix('<|im_end|>')}<|im_end|>]]\\n"
            in lines
        )


def test_examples_come_from_every_source_and_from_packs(bench: Bench) -> None:
    bench.rows(30)
    texts = bench.write(*({"text": f"some text {n}"} for n in range(30)), name="texts.jsonl")
    sources = [{"path": str(bench.train), "weight": 1}, {"path": str(texts), "weight": 1}]
    config = bench.config(task="cpt_mixed", train=sources)
    tokenizer = load_text_tokenizer(bench.tokenizer)
    examples = read_examples(bench.prepare(config).splits["train"], tokenizer)
    assert len(examples) == 3
    assert any(piece.text.startswith("some text") and piece.learned for one in examples for piece in one.pieces)
    assert any(piece.text.startswith("answer") and piece.learned for one in examples for piece in one.pieces)
    bench.rows(1)
    (only,) = read_examples(bench.prepare().splits["train"], tokenizer)
    assert (only.number, only.of) == (1, 1)


@pytest.mark.parametrize("style", STYLES)
def test_pieces_are_the_whole_text_of_a_row(tmp_path: Path, style: str) -> None:
    bench = Bench(tmp_path, style)
    bench.write(
        {"messages": [{"role": "user", "content": "café 日本 ?"}, {"role": "assistant", "content": "naïve 語 🙂"}]}
    )
    tokenizer = load_text_tokenizer(bench.tokenizer)
    if tokenizer.template is None:
        bench.write({"prompt": "café 日本 ?", "completion": "naïve 語 🙂"})
    (example,) = read_examples(bench.prepare().splits["train"], tokenizer)
    learned = "".join(piece.text for piece in example.pieces if piece.learned)
    assert "naïve 語 🙂" in learned
    assert "café" not in learned
    assert "�" not in "".join(piece.text for piece in example.pieces)


def test_a_character_over_two_pieces_breaks_nothing(bench: Bench) -> None:
    tokenizer = load_text_tokenizer(bench.tokenizer)
    ids = tokenizer.tokenizer.encode("a語b", add_special_tokens=False).ids
    pieces = list(pieces_of(ids, [n >= 2 for n in range(len(ids))], tokenizer))
    assert [piece.learned for piece in pieces] == [False, True]
    assert pieces[0].text.startswith("a")
    assert pieces[1].text.endswith("b")


def test_long_rows_are_shown_without_their_middle(bench: Bench) -> None:
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(20) for role in ("user", "assistant")]
    last = [{"role": "user", "content": "x" * 3000}, {"role": "assistant", "content": "the end"}]
    bench.write({"messages": turns}, {"messages": last})
    config = bench.config(max_seq_len=4096)
    many, long = read_examples(bench.prepare(config).splits["train"], load_text_tokenizer(bench.tokenizer))
    assert len(many.pieces) == 13
    assert "more pieces" in many.pieces[8].text
    assert "assistant 19" in many.pieces[-2].text
    assert "more characters" in long.pieces[0].text
    assert len(long.pieces[0].text) < 1.2 * PIECE_CHARACTERS
    assert long.pieces[1] == Piece(text="the end<|im_end|>", learned=True)


def test_nothing_in_a_row_reaches_the_terminal_as_a_command(bench: Bench) -> None:
    bench.write({"prompt": "\x1b[2J\r\x07", "completion": "bell \x1b[31m"})
    bench.write(pair(1), {"prompt": "a", "completion": "\x1b]0;title\x07" + "\u202e"})
    report = make_token_report(bench.config(), bench.prepare(), bench.tokenizer)
    lines = list(token_lines(report, colour=False, rows_told=False))
    assert all(line.isprintable() for line in lines)
    assert any("\\u001b]0;title\\u0007" in line for line in lines)
    bench.write({"prompt": "\x1b[2J", "completion": 1, "\x1bname": 1})
    assert all(line.isprintable() for line in row_lines(check_rows(bench.config(), 10)))


def test_bars_of_narrow_and_of_wide_lengths() -> None:
    narrow = [50 + n % 40 for n in range(1000)] + [300]
    bars = bars_of(narrow, split_facts(narrow))
    assert [end for end, _ in bars] == [50, 55, 60, 65, 70, 75, 80, 85, 90, 300]
    assert sum(count for _, count in bars) == 1001
    assert bars[0] == (50, 25)
    wide = [10] * 90 + [5000] * 10
    facts = split_facts(wide)
    assert bars_of(wide, facts) == facts.histogram
    one = split_facts([7])
    assert bars_of([7], one) == ((7, 1),)


def test_what_deserves_a_word() -> None:
    lengths = [30] * 100
    assert list(cautions(facts_of(split_facts(lengths), split_facts(lengths)))) == []
    train = split_facts(
        lengths,
        truncated=10,
        duplicates=20,
        end_of_turn_share=0.9,
        dropped={"overlong": 7, "nothing to learn": 6, "bad": 9},
    )
    proof = Proof(name="no doubled BOS", holds=3, of=5, words="these rows begin with two")
    said = list(cautions(facts_of(train, split_facts(lengths, leaking=4), proofs=(proof,))))
    assert said == [
        "4 rows of validation are trained on too: its loss flatters",
        "10% of the rows are cut at 64 tokens: how they end is not learned",
        "7% of the rows are dropped: over 64 tokens",
        "9% of the rows are left out: they are bad",
        "6% of the rows are dropped: nothing in them is learned",
        "20% of the rows repeat an earlier one: they count more than once",
        "10% of the rows lack a learned end of turn: the model may not stop",
        "no doubled BOS: not for 2 of 5: these rows begin with two",
    ]
    texts = split_facts(lengths, formats={"text": 100}, end_of_turn_share=0.0)
    assert list(cautions(facts_of(texts))) == []


def test_rows_that_only_the_template_refuses_are_listed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gemma")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    refused = {"messages": [{"role": "system", "content": "be brief"}, *turns]}
    bench.write({"messages": turns}, {"messages": 3}, refused, {"messages": turns})
    config = bench.config(on_bad_row="skip")
    rows = check_rows(config, 10)
    report = make_token_report(config, bench.prepare(config), bench.tokenizer, known_bad=rows.bad)
    assert [row.line for row in rows.bad_rows] == [2]
    assert [row["line"] for row in report.bad_rows] == [3]
    lines = list(token_lines(report, colour=False, rows_told=True))
    at = lines.index("bad rows found while tokenising: 1, left out")
    assert f"{bench.train}:3" in lines[at + 1]


def test_wrapped_examples_keep_their_marks() -> None:
    text = "word " * 40
    example = Example(number=1, of=1, tokens=80, loss_tokens=40, pieces=(Piece(text=text, learned=True),))
    facts = facts_of(split_facts([30] * 3))
    from sft_play.data.token_report import TokenReport

    report = TokenReport(facts=facts, histogram=((30, 3),), would_pack=None, examples=(example,), bad_rows=())
    plain = list(token_lines(report, colour=False, rows_told=True))
    green = list(token_lines(report, colour=True, rows_told=True))
    shown = [line for line in plain if "word" in line]
    assert all(len(line) <= 80 for line in shown)
    assert shown[0].startswith("    [[word")
    assert shown[-1].endswith("]]")
    coloured = [line for line in green if "word" in line]
    assert all(line.startswith("    \x1b[1;32m") and line.endswith("\x1b[0m") for line in coloured)


def test_what_a_stream_does_not_know_is_no_zero(bench: Bench) -> None:
    bench.rows(6)
    held = bench.write(pair(1), name="held.jsonl")
    for streaming, told in ((True, ["-", "0"]), (False, ["0", "0"])):
        config = bench.config(streaming=streaming, validation=str(held))
        report = make_token_report(config, bench.prepare(config), bench.tokenizer)
        lines = list(token_lines(report, colour=False, rows_told=False))
        rows = {line[:24].strip(): line[24:].split() for line in lines}
        assert rows["duplicates"] == told
        assert rows["trained on too"] == (["-", "-"] if streaming else ["0", "1"])
