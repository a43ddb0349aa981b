"""From files to Arrow: counts, policies, splits and the cache."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sft_play.config.schema import Config
from sft_play.data.cache import MANIFEST
from sft_play.data.encode import MASKED
from sft_play.data.prepare import Prepared, prepare, read_cached_facts
from sft_play.data.template import load_text_tokenizer
from sft_play.errors import DataError, SeveralErrors, SftPlayError
from sft_play.facts.data import DataFacts
from tests.data.templates_made import TEXT_END
from tests.data.tokenizers_made import CHATML, STYLES, make_tokenizer


class Bench:
    """A folder with a tokenizer, a data file and a cache, and the lines that were said."""

    def __init__(self, folder: Path, style: str = "chatml") -> None:
        self.folder = folder
        self.tokenizer = make_tokenizer(style, folder)
        self.train = folder / "train.jsonl"
        self.cache = folder / "cache"
        self.said: list[str] = []

    def rows(self, count: int, **more: Any) -> None:
        self.write(*({"prompt": f"question {n}", "completion": f"answer {n}"} | more for n in range(count)))

    def write(self, *rows: object, name: str = "train.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("\n".join(lines) + "\n")
        return self.folder / name

    def config(self, max_seq_len: int = 128, seed: int = 42, **data: Any) -> Config:
        values = {
            "model": {"name": str(self.tokenizer), "max_seq_len": max_seq_len},
            "data": {"train": str(self.train)} | data,
            "train": {"seed": seed},
        }
        return Config.model_validate(values)

    def prepare(self, config: Config | None = None, **data: Any) -> Prepared:
        self.said.clear()
        return prepare(config or self.config(**data), self.tokenizer, self.cache, self.said.append)

    def decoded(self, ids: list[int]) -> str:
        return load_text_tokenizer(self.tokenizer).tokenizer.decode(ids, skip_special_tokens=True)

    def answers(self, prepared: Prepared, split: str = "train") -> list[str]:
        tokenizer = load_text_tokenizer(self.tokenizer).tokenizer
        learned = [[label for label in row["labels"] if label != MASKED] for row in read(prepared, split)]
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in learned]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def read(prepared: Prepared, split: str = "train") -> list[dict[str, list[int]]]:
    with pa.memory_map(str(prepared.splits[split])) as source:
        rows: list[dict[str, list[int]]] = pa.ipc.open_stream(source).read_all().to_pylist()
    return rows


def refusal(bench: Bench, **data: Any) -> SftPlayError:
    with pytest.raises(SftPlayError) as caught:
        bench.prepare(**data)
    assert not bench.cache.exists() or not any(bench.cache.iterdir())
    return caught.value


def test_rows_in_file_order_and_facts_that_count_them(bench: Bench) -> None:
    bench.rows(2500)
    prepared = bench.prepare()
    rows = read(prepared)
    assert bench.answers(prepared) == [f"answer {n}" for n in range(2500)]
    facts = prepared.facts.splits["train"]
    assert (facts.rows_read, facts.rows_kept, facts.dropped, facts.truncated) == (2500, 2500, {}, 0)
    assert facts.tokens == sum(len(row["input_ids"]) for row in rows)
    assert facts.loss_tokens == sum(label != MASKED for row in rows for label in row["labels"])
    assert facts.longest == max(len(row["input_ids"]) for row in rows)
    assert sum(count for _, count in facts.histogram) == 2500
    assert facts.percentiles[50] == sorted(len(row["input_ids"]) for row in rows)[1250]
    assert facts.formats == {"prompt_completion": 2500}
    assert facts.end_of_turn_share == 1.0
    assert DataFacts.from_json(prepared.facts.to_json()) == prepared.facts
    assert "data: train: 2,500 rows read; format: 2,500 prompt_completion" in bench.said
    assert "data: train: question and answer become a user and an assistant turn of the chat template" in bench.said


def test_the_datasets_library_reads_it(bench: Bench) -> None:
    import datasets

    bench.rows(5)
    prepared = bench.prepare()
    loaded = datasets.Dataset.from_file(str(prepared.splits["train"]))
    assert loaded.column_names == ["input_ids", "labels", "source", "closes"]
    assert loaded.to_list() == read(prepared)
    assert loaded.features["labels"].feature.dtype == "int32"


def test_facts_refuse_other_json() -> None:
    for text in ("{}", "[]", "x", '{"splits": {}, "unused_columns": [], "more": 1}'):
        with pytest.raises(ValueError):
            DataFacts.from_json(text)


def test_every_bad_row_is_reported_up_to_a_limit(bench: Bench) -> None:
    good = {"prompt": "a", "completion": "b"}
    bench.write(good, *({"prompt": n} for n in range(30)), good)
    error = refusal(bench)
    assert isinstance(error, SeveralErrors)
    lines = error.lines()
    assert len(lines) == 21
    assert lines[0] == (
        f"{bench.train}:2: prompt: text expected, found a number (row begins '{{\"prompt\": 0}}')"
        " -> docs/data.md shows the formats"
    )
    assert lines[20] == "data: 10 more bad rows, 30 of 32 in all -> mend them, or set data.on_bad_row: skip"


def test_bad_rows_skipped_are_counted_and_written(bench: Bench) -> None:
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    bench.tokenizer = make_tokenizer("gemma", bench.folder)
    bench.write({"messages": 3}, {"messages": [*system, {"role": "assistant", "content": "a"}]}, chat_row("q", "kept"))
    prepared = bench.prepare(on_bad_row="skip")
    assert bench.answers(prepared) == ["kept"]
    assert prepared.facts.splits["train"].dropped == {"bad": 2}
    assert prepared.rejects is not None
    rejected = [json.loads(line) for line in prepared.rejects.read_text().splitlines()]
    assert [(one["line"], one["field"], one["reason"]) for one in rejected] == [
        (1, "messages", "a list of messages expected, found a number"),
        (2, "", "the chat template refuses the row: System role not supported"),
    ]
    assert "1 rows, " in bench.said[-2]
    assert "2 dropped (bad)" in bench.said[-2]
    assert bench.said[-1] == f"data: the bad rows stand in {prepared.rejects}"
    error = refusal(Bench(bench.folder / "other", "gemma"), train=str(bench.train))
    assert [line.split(": ")[0] for line in error.lines()] == [f"{bench.train}:1"]


def chat_row(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def test_rows_without_anything_to_learn_are_counted(bench: Bench) -> None:
    bench.write(chat_row("only a question"), chat_row("  ", " "), {"messages": []}, chat_row("q", "a"))
    prepared = bench.prepare()
    assert prepared.facts.splits["train"].dropped == {"empty": 2, "nothing to learn": 1}
    assert bench.answers(prepared) == ["a"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "train.jsonl: 0 rows -> put rows in it"),
        ([""], "train.jsonl: 0 rows"),
        ([chat_row("q"), chat_row("q")], "data.train: no row is left to learn from, of 2 read: 2 nothing to learn"),
        ([{"text": " "}], "data.train: no row is left to learn from, of 1 read: 1 empty"),
    ],
)
def test_nothing_to_learn_at_all_is_refused(bench: Bench, rows: list[object], words: str) -> None:
    bench.write(*rows)
    assert words in refusal(bench).line()


class TestOverlong:
    """An exact length, one token more, and an answer that begins beyond the limit."""

    @pytest.fixture
    def rows(self, bench: Bench) -> list[int]:
        bench.write(chat_row("q", "a"), chat_row("q", "a" * 40), chat_row("q " * 100, "a"))
        return [len(row["input_ids"]) for row in read(bench.prepare(max_seq_len=10_000))]

    def test_a_row_at_the_limit_is_whole(self, bench: Bench, rows: list[int]) -> None:
        facts = bench.prepare(max_seq_len=rows[2]).facts.splits["train"]
        assert (facts.truncated, facts.dropped, facts.longest) == (0, {}, rows[2])

    def test_truncate_keeps_what_can_be_learned(self, bench: Bench, rows: list[int]) -> None:
        limit = rows[1] - 2
        prepared = bench.prepare(max_seq_len=limit)
        facts = prepared.facts.splits["train"]
        assert (facts.truncated, facts.dropped, facts.longest) == (1, {"overlong": 1}, limit)
        # The newline after the end token and the end token itself are cut off.
        assert facts.end_of_turn_share == 0.5
        assert bench.answers(prepared) == ["a", "a" * 40]

    def test_drop(self, bench: Bench, rows: list[int]) -> None:
        facts = bench.prepare(max_seq_len=rows[1] - 1, on_overlong="drop").facts.splits["train"]
        assert (facts.rows_kept, facts.truncated, facts.dropped) == (1, 0, {"overlong": 2})

    def test_error(self, bench: Bench, rows: list[int]) -> None:
        with pytest.raises(SeveralErrors) as caught:
            bench.prepare(max_seq_len=rows[1], on_overlong="error", on_bad_row="skip")
        assert [line.split(" (row")[0] for line in caught.value.lines()] == [
            f"{bench.train}:3: {rows[2]} tokens, model.max_seq_len is {rows[1]}"
        ]
        assert "set data.on_overlong to truncate, drop or split" in caught.value.line()

    def test_error_of_many(self, bench: Bench) -> None:
        """The advice is one that helps: on_bad_row spares no overlong row."""
        bench.write(*({"prompt": "q", "completion": "a" * 100} for _ in range(30)))
        with pytest.raises(SeveralErrors) as caught:
            bench.prepare(bench.config(max_seq_len=50, on_overlong="error"))
        last = caught.value.lines()[-1]
        assert last.startswith("data: 10 more overlong rows, 30 of 30 in all -> raise model.max_seq_len, or set")

    def test_all_too_long(self, bench: Bench, rows: list[int]) -> None:
        with pytest.raises(DataError, match="no row is left to learn from, of 3 read: 3 overlong"):
            bench.prepare(max_seq_len=3)


def test_held_out_rows_are_exact_disjoint_and_fixed_by_the_seed(bench: Bench) -> None:
    bench.rows(200)
    split = {"validation": 0.1, "test": 0.05}
    first = bench.prepare(split=split)
    found = {name: bench.answers(first, name) for name in first.splits}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 170, "validation": 20, "test": 10}
    assert sorted(text for rows in found.values() for text in rows) == sorted(f"answer {n}" for n in range(200))
    assert found["train"] == sorted(found["train"], key=lambda text: int(text.split()[1]))
    shutil.rmtree(bench.cache)
    assert bench.prepare(split=split).facts == first.facts
    other = bench.prepare(split=split, seed=7)
    assert bench.answers(other, "validation") != found["validation"]


def test_equal_rows_are_never_on_both_sides(bench: Bench) -> None:
    bench.write(*({"prompt": f"q {n % 20}", "completion": f"a {n % 20}"} for n in range(100)))
    prepared = bench.prepare(split={"validation": 0.2})
    train, validation = (bench.answers(prepared, name) for name in ("train", "validation"))
    assert len(validation) == 20
    assert not set(train) & set(validation)


def test_files_for_held_out_rows_win_over_shares(bench: Bench) -> None:
    bench.rows(20)
    validation = bench.write({"prompt": "v", "completion": "held out"}, name="validation.jsonl")
    prepared = bench.prepare(validation=str(validation), split={"validation": 0.5, "test": 0.1})
    assert bench.answers(prepared, "validation") == ["held out"]
    assert {name: len(read(prepared, name)) for name in prepared.splits} == {"train": 18, "validation": 1, "test": 2}


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"validation": 0.01}, "data.split.validation: a share of 0.01 of 4 rows is no row at all"),
        ({"validation": 0.6, "test": 0.5}, "data.split: held-out shares of 1.1 leave nothing to train on"),
        ({"validation": 0.9}, "data.split: the held-out shares take every row"),
    ],
)
def test_shares_that_cannot_be_had(bench: Bench, split: dict[str, float], words: str) -> None:
    bench.rows(4)
    assert words in refusal(bench, split=split).line()


def test_row_limits_sample_by_seed_in_file_order(bench: Bench) -> None:
    bench.rows(300)
    prepared = bench.prepare(max_rows=50)
    answers = bench.answers(prepared)
    numbers = [int(text.split()[1]) for text in answers]
    assert len(numbers) == 50
    assert numbers == sorted(numbers)
    assert numbers != list(range(50))
    assert prepared.facts.splits["train"].dropped == {"not sampled": 250}
    assert bench.answers(bench.prepare(max_rows=50, seed=1)) != answers
    other = bench.write({"prompt": "x", "completion": "other"}, name="other.jsonl")
    mixed = bench.prepare(train=[{"path": str(bench.train), "max_rows": 5}, str(other)])
    assert len(bench.answers(mixed)) == 6
    assert bench.answers(mixed)[-1] == "other"


class TestCache:
    """One entry a content: found again wherever the files are, and never half written."""

    def test_hit_and_what_makes_a_miss(self, bench: Bench) -> None:
        bench.rows(50)
        first = bench.prepare()
        assert not first.hit
        assert bench.said[0] == "data: not in the cache (nothing is prepared yet); preparing"
        again = bench.prepare()
        assert (again.hit, again.facts, again.splits) == (True, first.facts, first.splits)
        assert bench.said[0].startswith("data: taken from the cache")

        self.miss(bench, "model.max_seq_len 128 -> 64", max_seq_len=64)
        self.miss(bench, "data.loss_on assistant -> last", loss_on="last")
        bench.prepare()
        bench.train.write_text(bench.train.read_text().replace("answer 7", "answer_7"))
        changed = self.miss(bench, "data.train changed")
        assert changed.facts.fingerprint != first.facts.fingerprint

    def miss(self, bench: Bench, reason: str, **data: Any) -> Prepared:
        prepared = bench.prepare(**data)
        assert not prepared.hit
        assert bench.said[0] == f"data: not in the cache ({reason}); preparing"
        return prepared

    def test_another_template_or_tokenizer_is_a_miss(self, bench: Bench) -> None:
        bench.rows(50)
        bench.prepare()
        (bench.tokenizer / "chat_template.jinja").write_text("{# mine #}" + CHATML)
        self.miss(bench, "the chat template changed")
        (bench.tokenizer / "tokenizer.json").write_text((bench.tokenizer / "tokenizer.json").read_text() + " ")
        self.miss(bench, "the tokenizer's tokenizer.json changed")

    def test_the_seed_matters_only_where_rows_are_drawn(self, bench: Bench) -> None:
        bench.rows(50)
        bench.prepare(seed=1)
        assert bench.prepare(seed=2).hit
        bench.prepare(seed=1, max_rows=10)
        assert not bench.prepare(seed=2, max_rows=10).hit

    def test_moved_elsewhere_is_a_hit(self, bench: Bench) -> None:
        bench.rows(50)
        bench.prepare()
        moved = bench.folder / "moved"
        moved.mkdir()
        bench.train = bench.train.rename(moved / "renamed.jsonl")
        bench.tokenizer = bench.tokenizer.rename(moved / "model")
        assert bench.prepare().hit

    def test_order_counts(self, bench: Bench) -> None:
        bench.rows(50)
        first = bench.prepare()
        bench.train.write_text("\n".join(reversed(bench.train.read_text().splitlines())))
        assert bench.prepare().facts.fingerprint != first.facts.fingerprint

    @pytest.mark.parametrize("damage", ["no manifest", "cut manifest", "cut data", "no data"])
    def test_a_half_written_entry_is_made_anew(self, bench: Bench, damage: str) -> None:
        bench.rows(50)
        first = bench.prepare()
        folder = first.splits["train"].parent
        target = folder / (MANIFEST if "manifest" in damage else "train.arrow")
        if damage.startswith("no"):
            target.unlink()
        else:
            target.write_bytes(target.read_bytes()[:-1])
        second = self.miss(bench, "the entry is damaged")
        assert second.facts == first.facts
        assert [one.name for one in bench.cache.iterdir()] == [folder.name]

    def test_a_killed_preparation_leaves_nothing_that_is_used(self, bench: Bench, monkeypatch: Any) -> None:
        bench.rows(50)

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("sft_play.data.cache._sync", die)
            with pytest.raises(KeyboardInterrupt):
                bench.prepare()
        assert not bench.prepare().hit

    def test_two_at_once_share_what_the_first_to_end_has_made(self, bench: Bench) -> None:
        bench.rows(3)
        inner: list[Prepared] = []

        def meanwhile(line: str) -> None:
            if "rows read" in line:
                inner.append(prepare(bench.config(), bench.tokenizer, bench.cache, lambda _: None))

        outer = prepare(bench.config(), bench.tokenizer, bench.cache, meanwhile)
        assert [one.hit for one in (*inner, outer)] == [False, False]
        assert outer.splits == inner[0].splits
        assert outer.facts == inner[0].facts
        assert len(list(bench.cache.iterdir())) == 1
        assert bench.prepare().hit

    def test_a_folder_that_is_not_ours_is_not_deleted(self, bench: Bench) -> None:
        bench.rows(50)
        folder = bench.prepare().splits["train"].parent
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "thesis.txt").write_text("precious")
        assert not bench.prepare().hit
        assert [file.read_text() for file in bench.cache.rglob("thesis.txt")] == ["precious"]

    def test_facts_for_planning(self, bench: Bench) -> None:
        bench.rows(50)
        config = bench.config()
        assert read_cached_facts(config, bench.tokenizer, bench.cache) is None
        prepared = bench.prepare()
        assert read_cached_facts(config, bench.tokenizer, bench.cache) == prepared.facts
        assert replace(prepared.facts, key="x") != prepared.facts


def test_chat_rows_without_a_template(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "bare")
    bench.write(chat_row("q", "a"))
    assert "has no chat template, and chat rows need one" in refusal(bench).line()
    bench.write({"instruction": "do", "output": "done"})
    prepared = bench.prepare()
    assert bench.answers(prepared) == ["done"]
    assert any("alpaca under ### headings" in line for line in bench.said)


def test_unused_columns_are_named(bench: Bench) -> None:
    bench.rows(3, id=1, source="web")
    prepared = bench.prepare()
    assert prepared.facts.unused_columns == ("id", "source")
    assert "data: train: not used: id, source" in bench.said


def test_rows_as_alike_as_their_format(bench: Bench) -> None:
    """The same conversation as messages, sharegpt and prompt/completion gives the same tokens."""
    forms = [
        chat_row("q", "a"),
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "input": "", "output": "a"},
    ]
    found = []
    for form in forms:
        bench.write(form)
        found.append(read(bench.prepare()))
    assert all(rows == found[0] for rows in found)


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_a_file_changed_after_it_was_hashed(bench: Bench, change: str) -> None:
    """Else its rows would lie in the cache under the name of other ones."""
    bench.rows(10)
    before = bench.train.read_text()

    def edit(line: str) -> None:
        if change == "edited" and "not in the cache" in line:
            bench.train.write_text(before.replace("answer 3", "answer X"))
        if change == "gone" and "rows read" in line:
            bench.train.unlink()

    with pytest.raises(DataError, match="changed while it was read" if change == "edited" else "cannot be read"):
        prepare(bench.config(), bench.tokenizer, bench.cache, edit)
    bench.train.write_text(before)
    prepared = bench.prepare()
    assert not prepared.hit
    assert "answer 3" in bench.answers(prepared)


def test_large_files_are_read_twice_to_the_same_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.rows(100)
    held = bench.prepare(split={"validation": 0.1}, max_rows=50)
    shutil.rmtree(bench.cache)
    monkeypatch.setattr("sft_play.data.validate.KEPT_BYTES", 0)
    assert bench.prepare(split={"validation": 0.1}, max_rows=50).facts == held.facts

    def grow(line: str) -> None:
        if "rows read" in line:
            bench.train.write_text(bench.train.read_text() * 2)

    with pytest.raises(DataError, match="a file changed while it was read"):
        prepare(bench.config(), bench.tokenizer, bench.cache, grow)


@pytest.mark.parametrize(
    ("style", "template", "said"),
    [
        ("mistral", "{{ bos_token }}" + str(STYLES["mistral"].template), "no BOS is doubled"),
        ("chatml", TEXT_END, "the end of the turn is learned"),
    ],
)
def test_what_is_disproved_on_most_rows_is_refused(bench: Bench, style: str, template: str, said: str) -> None:
    bench.write(*(chat_row(f"q {n}", f"a {n}") for n in range(5)))
    bench.tokenizer = make_tokenizer(style, bench.folder, template=template)
    error = refusal(bench)
    assert "5 of 5 cases fail the proof that " + said in error.line()
    assert "set model.chat_template" in error.fix
