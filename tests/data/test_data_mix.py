"""Several sources, texts and long rows: what is taken, how it is cut, and that it is counted and said."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft_play.data import mix
from sft_play.data.encode import MASKED, Encoded
from sft_play.data.mix import share_rows
from sft_play.data.overlong import Blocks, split_row
from sft_play.errors import DataError, SeveralErrors
from tests.data.test_data_prepare import Bench, read, refusal


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def pairs(bench: Bench, name: str, count: int) -> str:
    rows = [{"prompt": f"{name} {n}?", "completion": f"{name} {n}"} for n in range(count)]
    return str(bench.write(*rows, name=f"{name}.jsonl"))


def texts(bench: Bench, name: str, *documents: str) -> str:
    return str(bench.write(*({"text": text} for text in documents), name=f"{name}.jsonl"))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 10_000))
def test_shares_add_up_and_are_within_a_row(weights: list[float], total: int) -> None:
    rows = share_rows(weights, total)
    assert sum(rows) == total
    assert all(abs(n - total * w / sum(weights)) < 1 for n, w in zip(rows, weights, strict=True))


def test_weights_are_kept_to_and_said(bench: Bench) -> None:
    """A small source is gone through several times, a large one is sampled; each row nearly as often as the others."""
    train = [
        {"path": pairs(bench, "a", 40), "weight": 3},
        {"path": pairs(bench, "b", 900), "weight": 1},
        {"path": pairs(bench, "c", 60), "weight": 6},
    ]
    prepared = bench.prepare(train=train)
    facts = prepared.facts.splits["train"]
    assert [source.taken for source in facts.sources] == [300, 100, 600]
    assert [source.rows for source in facts.sources] == [40, 900, 60]
    assert facts.rows_kept == 1000
    assert sum(source.tokens for source in facts.sources) == facts.tokens
    times = Counter(bench.answers(prepared))
    for name, least, most in (("a", 7, 8), ("b", 1, 1), ("c", 10, 10)):
        assert {least, most} == {count for answer, count in times.items() if answer.startswith(name)}
    assert any("a.jsonl 30.0% (7.50 x 40 rows)" in line for line in bench.said)


def test_the_mix_depends_on_the_seed_alone(bench: Bench) -> None:
    train = [{"path": pairs(bench, "a", 30), "weight": 1}, {"path": pairs(bench, "b", 100), "weight": 2}]
    mixes = []
    for seed in (1, 1, 2):
        mixes.append(sorted(bench.answers(bench.prepare(bench.config(train=train, seed=seed)))))
        for manifest in bench.cache.glob("*/manifest.json"):
            manifest.unlink()
    assert mixes[0] == mixes[1]
    assert mixes[0] != mixes[2]


@pytest.mark.parametrize("weight", [1e308, 1e-308])
def test_weights_of_any_size(bench: Bench, weight: float) -> None:
    assert share_rows([weight, weight, weight], 9) == [3, 3, 3]
    train = [{"path": pairs(bench, "a", 30), "weight": weight}, {"path": pairs(bench, "b", 10), "weight": weight}]
    assert [source.taken for source in bench.prepare(train=train).facts.splits["train"].sources] == [20, 20]


def test_one_row_gone_through_thousands_of_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are read once for their places and once to be written, not once a pass."""
    passes: list[Path] = []
    original = mix.read_batches
    monkeypatch.setattr(mix, "read_batches", lambda file: passes.append(file) or original(file))
    train = [{"path": pairs(bench, "a", 1), "weight": 999}, {"path": pairs(bench, "b", 3000), "weight": 1}]
    prepared = bench.prepare(train=train)
    assert len(passes) == 2
    assert [source.taken for source in prepared.facts.splits["train"].sources] == [2998, 3]
    assert Counter(answer[0] for answer in bench.answers(prepared)) == {"a": 2998, "b": 3}


def test_a_weighted_mix_within_max_rows(bench: Bench) -> None:
    train = [{"path": pairs(bench, "a", 30), "weight": 1}, {"path": pairs(bench, "b", 100), "weight": 1}]
    facts = bench.prepare(train=train, max_rows=50).facts.splits["train"]
    assert [source.taken for source in facts.sources] == [25, 25]


def test_a_source_with_nothing_to_give_is_named(bench: Bench) -> None:
    bench.write({"prompt": "q", "completion": " "}, name="none.jsonl")
    train = [{"path": pairs(bench, "a", 3), "weight": 1}, {"path": str(bench.folder / "none.jsonl"), "weight": 1}]
    assert "no row of " in (line := refusal(bench, train=train).line())
    assert "none.jsonl is left to learn from" in line


def test_without_weights_sources_stand_one_after_the_other(bench: Bench) -> None:
    prepared = bench.prepare(train=[pairs(bench, "a", 3), pairs(bench, "b", 2)])
    assert bench.answers(prepared) == ["a 0", "a 1", "a 2", "b 0", "b 1"]
    assert [row["source"] for row in read(prepared)] == [0, 0, 0, 1, 1]


def encoded(length: int, learned: set[int]) -> Encoded:
    labels = [n if n in learned else MASKED for n in range(length)]
    return Encoded(input_ids=list(range(length)), labels=labels, closings=(length - 1,))


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_pieces_learn_every_token_once(length: int, limit: int, data: st.DataObject) -> None:
    learned = data.draw(st.sets(st.integers(1, length - 1), min_size=1))
    pieces = split_row(encoded(length, learned), limit)
    assert all(len(piece.input_ids) <= limit for piece in pieces)
    found = [label for piece in pieces for label in piece.labels if label != MASKED]
    assert sorted(found) == sorted(learned)
    for piece in pieces:
        assert piece.loss_tokens
        assert all(b == a + 1 for a, b in pairwise(piece.input_ids))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 16))
def test_blocks_run_on_across_documents(lengths: list[int], limit: int) -> None:
    blocks = Blocks(limit)
    made = [block for n in lengths for block in blocks.add(encoded(n, set(range(n))))]
    assert all(len(block.input_ids) == limit for block in made)
    made += blocks.rest()
    stream = [token for n in lengths for token in range(n)]
    assert [token for block in made for token in block.input_ids[1:]] == stream[1:]
    assert sum(block.loss_tokens for block in made) == len(stream) - 1


def test_a_long_answer_in_pieces(bench: Bench) -> None:
    bench.write({"prompt": "q", "completion": "word " * 60}, {"prompt": "q", "completion": "short"})
    config = bench.config(max_seq_len=64, on_overlong="split")
    facts = bench.prepare(config).facts.splits["train"]
    whole = bench.prepare(bench.config(max_seq_len=1000)).facts.splits["train"]
    assert facts.split_up == 1
    assert facts.rows_kept > 2
    assert facts.loss_tokens == whole.loss_tokens
    assert any("1 split up" in line for line in [*bench.said, *_again(bench, config)])


def _again(bench: Bench, config) -> list[str]:
    bench.prepare(config)
    return bench.said


def test_cpt_cuts_documents_into_blocks_of_their_own(bench: Bench) -> None:
    train = texts(bench, "t", "one " * 100, "two " * 30)
    facts = bench.prepare(bench.config(max_seq_len=64, task="cpt", train=train)).facts.splits["train"]
    assert facts.split_up == 2
    assert facts.truncated == 0
    rows = read(bench.prepare(bench.config(max_seq_len=64, task="cpt", train=train)))
    words = [bench.decoded(row["input_ids"]) for row in rows]
    assert not any("one" in text and "two" in text for text in words)


def test_cpt_across_documents_when_asked(bench: Bench) -> None:
    train = texts(bench, "t", *("word " * n for n in range(1, 30)))
    config = bench.config(max_seq_len=64, task="cpt", train=train, cross_documents=True)
    rows = read(bench.prepare(config))
    assert {len(row["input_ids"]) for row in rows[:-1]} == {64}


def test_cpt_takes_no_chat_and_cpt_mixed_masks_each_its_own_way(bench: Bench) -> None:
    text, chat = texts(bench, "t", "all of this is learned"), pairs(bench, "a", 1)
    error = refusal(bench, task="cpt", train=[text, chat])
    assert isinstance(error, SeveralErrors)
    assert "a prompt_completion row, and data.task cpt learns texts" in error.line()
    rows = read(bench.prepare(task="cpt_mixed", train=[text, chat]))
    assert MASKED not in rows[0]["labels"][1:]
    assert bench.decoded([label for label in rows[1]["labels"] if label != MASKED]).startswith("a 0")


def test_duplicates_and_leaks_are_counted_and_said(bench: Bench) -> None:
    bench.rows(10)
    lines = bench.train.read_text().splitlines()
    bench.train.write_text("\n".join([*lines, lines[3], lines[3]]) + "\n")
    held_out = bench.folder / "held.jsonl"
    held_out.write_text("\n".join([lines[1], json.dumps({"prompt": "new", "completion": "new"})]) + "\n")
    facts = bench.prepare(validation=str(held_out)).facts.splits
    assert facts["train"].duplicates == 2
    assert facts["validation"].leaking == 1
    assert any("2 rows say the same as an earlier one" in line for line in bench.said)
    assert any("1 rows stand in the training data too" in line for line in bench.said)


def test_a_set_that_never_learns_to_stop_is_refused(bench: Bench) -> None:
    bench.write(*({"prompt": "q", "completion": "word " * 200} for _ in range(3)))
    with pytest.raises(DataError, match="no answer keeps its end-of-turn token within 64 tokens"):
        bench.prepare(bench.config(max_seq_len=64))


def test_flags_that_nothing_looks_at_are_said(bench: Bench) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]
    bench.write({"messages": turns})
    bench.prepare()
    assert any("1 rows have loss flags of their own" in line for line in bench.said)
