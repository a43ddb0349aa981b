"""Streamed rows: the same sequence from anywhere, in the mix that was asked for, with its faults told."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from sft_play.config.schema import Config
from sft_play.data import stream as streams
from sft_play.data.encode import MASKED
from sft_play.data.prepare import open_stream
from sft_play.data.stream import Tokens
from sft_play.data.stream_index import StreamIndex
from sft_play.errors import SftPlayError
from sft_play.facts.data import SplitFacts
from tests.data.test_data_prepare import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 16)
    made = Bench(tmp_path)
    made.rows(50)
    return made


def sequences(bench: Bench, config: Config, count: int, *, skip: int = 0, keep: bool = False) -> list[Tokens]:
    index = StreamIndex(bench.folder / "run")
    return list(islice(open_stream(config, bench.tokenizer).sequences(skip, index, keep=keep), count))


def answers(bench: Bench, rows: list[Tokens]) -> list[str]:
    return [bench.decoded([label for label in row["labels"] if label != MASKED]).strip() for row in rows]


def test_each_row_once_a_pass_in_an_order_of_its_own(bench: Bench) -> None:
    said = answers(bench, sequences(bench, bench.config(streaming=True), 100))
    assert Counter(said) == {f"answer {n}": 2 for n in range(50)}
    assert said[:50] != [f"answer {n}" for n in range(50)]
    assert said[:50] != said[50:]


def test_the_order_depends_on_the_seed_alone(bench: Bench) -> None:
    first, again, other = (sequences(bench, bench.config(streaming=True, seed=seed), 60) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("skip", [1, 15, 16, 40, 97])
def test_going_on_from_anywhere(bench: Bench, skip: int, keep: bool, packing: bool) -> None:
    """With the index of the first part, and without."""
    config = bench.config(streaming=True, packing=packing)
    straight = sequences(bench, config, 120, keep=keep)
    assert sequences(bench, config, 120 - skip, skip=skip, keep=True) == straight[skip:]


def test_known_windows_are_not_tokenised_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bench.config(streaming=True)
    straight = sequences(bench, config, 160, keep=True)
    tokenised: list[int] = []
    original = streams.encode_rows

    def counting(tokenizer, rows):
        tokenised.append(len(rows))
        return original(tokenizer, rows)

    monkeypatch.setattr(streams, "encode_rows", counting)
    assert sequences(bench, config, 5, skip=140) == straight[140:145]
    assert sum(tokenised) <= 32


def test_weights_hold_at_every_moment(bench: Bench) -> None:
    bench.write(*({"prompt": "q", "completion": f"b {n}"} for n in range(7)), name="b.jsonl")
    train = [{"path": str(bench.train), "weight": 1}, {"path": str(bench.folder / "b.jsonl"), "weight": 3}]
    said = answers(bench, sequences(bench, bench.config(streaming=True, train=train), 320))
    for window in range(0, 320, 16):
        assert sum(answer.startswith("b") for answer in said[window : window + 16]) == 12


def test_packs_hold_whole_documents(bench: Bench) -> None:
    plain = sequences(bench, bench.config(streaming=True), 16)
    packs = sequences(bench, bench.config(streaming=True, packing=True), 8)
    documents = []
    for pack in packs:
        if len(documents) == 16:
            break
        at = 0
        assert sum(pack["lengths"]) == len(pack["input_ids"]) <= 128
        for length in pack["lengths"]:
            assert pack["labels"][at] == MASKED
            documents.append(tuple(pack["input_ids"][at : at + length]))
            at += length
    assert sorted(documents) == sorted(tuple(row["input_ids"]) for row in plain)


def test_long_texts_come_in_pieces(bench: Bench) -> None:
    bench.write({"text": "word " * 300}, {"text": "short"})
    config = bench.config(max_seq_len=64, task="cpt", streaming=True)
    rows = sequences(bench, config, 40)
    assert max(len(row["input_ids"]) for row in rows) == 64


def test_a_bad_row_ends_it_or_is_written_down(bench: Bench) -> None:
    with bench.train.open("a") as stream:
        stream.write("not json\n")
    with pytest.raises(SftPlayError, match=r"train\.jsonl:51: not JSON"):
        sequences(bench, bench.config(streaming=True), 60)
    config = bench.config(streaming=True, on_bad_row="skip")
    assert len(sequences(bench, config, 60, keep=True)) == 60
    (reject, *_) = map(json.loads, (bench.folder / "run/rejects.jsonl").read_text().splitlines())
    assert (reject["line"], reject["row"]) == (51, "not json")


def test_bad_and_empty_rows_are_counted_and_written_down_once(bench: Bench) -> None:
    """However often a stream goes over its files, and also where a run is resumed."""
    with bench.train.open("a") as stream:
        stream.write('not json\n{"prompt": "q", "completion": " "}\n')
    config = bench.config(streaming=True, on_bad_row="skip")
    straight = sequences(bench, config, 160, keep=True)
    assert sequences(bench, config, 160, skip=100, keep=True)[:60] == straight[100:]
    assert len((bench.folder / "run/rejects.jsonl").read_text().splitlines()) == 1
    windows = [json.loads(line) for line in (bench.folder / "run/stream.jsonl").read_text().splitlines()]
    assert [line["window"] for line in windows] == list(range(len(windows)))
    assert [line["rows"] for line in windows[:5]] == [16, 16, 16, 4, 16]
    assert windows[3]["dropped"] == {"bad": 1, "empty": 1}
    assert windows[4]["dropped"] == {}
    facts = prepare_stream(bench, config, window_rows=100)
    assert (facts.rows_read, facts.rows_kept, facts.dropped) == (52, 50, {"bad": 1, "empty": 1})


def prepare_stream(bench: Bench, config: Config, *, window_rows: int) -> SplitFacts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "WINDOW_ROWS", window_rows)
        return bench.prepare(config).facts.splits["train"]


@pytest.mark.parametrize("torn", ['{"window": 4, "sequ', "\0\0\0\n", '{"window": 4}'])
def test_an_index_cut_off_by_a_kill(bench: Bench, torn: str) -> None:
    config = bench.config(streaming=True)
    straight = sequences(bench, config, 160, keep=True)
    index = bench.folder / "run/stream.jsonl"
    whole = index.read_text()
    index.write_text("".join(whole.splitlines(keepends=True)[:4]) + torn)
    assert sequences(bench, config, 100, skip=60, keep=True) == straight[60:]
    assert index.read_text() == whole
    assert sequences(bench, config, 20, skip=140, keep=True) == straight[140:]


def test_nothing_to_learn_does_not_run_forever(bench: Bench) -> None:
    bench.write({"prompt": "q", "completion": " "})
    with pytest.raises(SftPlayError, match="no row is left to learn from"):
        sequences(bench, bench.config(streaming=True), 1)


def test_prepare_looks_at_the_beginning_and_prepares_what_is_held_out(bench: Bench) -> None:
    held = bench.write({"prompt": "q", "completion": "a"}, name="held.jsonl")
    prepared = bench.prepare(streaming=True, validation=str(held))
    assert set(prepared.splits) == {"validation"}
    facts = prepared.facts.splits["train"]
    assert facts.streamed
    assert facts.rows_read == 16
    before = prepared.facts.fingerprint
    bench.rows(51)
    assert bench.prepare(streaming=True, validation=str(held)).facts.fingerprint != before
