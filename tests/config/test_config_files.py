"""YAML files: what they may hold, includes, old names, and every way in which one can be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from written import BASE, ErrorLines, ResolveText

from sft_play.config.keys import KEYS
from sft_play.config.old_names import OLD_NAMES
from sft_play.config.origin import OriginKind
from sft_play.config.resolve import resolve
from sft_play.config.sources import read_files
from sft_play.errors import SftPlayError


def test_yaml_1_2_numbers_and_words(resolve_text: ResolveText) -> None:
    config = resolve_text("train: {learning_rate: 1e-4, eval_strategy: no, bf16: yes, max_steps: none}").config
    assert config.train.learning_rate == 1e-4
    assert config.train.eval_strategy == "no"
    assert config.train.bf16 is True
    assert config.train.max_steps is None


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("dist: {gpus: '0,1'}", "dist.gpus", (0, 1)),
        ("dist: {gpus: [2]}", "dist.gpus", (2,)),
        ("dist: {gpus: all}", "dist.gpus", "all"),
        ("dist: {gpus: 4}", "dist.gpus", 4),
        ("run: {report_to: none}", "run.report_to", ()),
        ("run: {report_to: tensorboard}", "run.report_to", ("tensorboard",)),
        ("run: {name: 2024-01-01}", "run.name", "2024-01-01"),
        ("tuning: {lora: {target_modules: 'q_proj, v_proj'}}", "tuning.lora.target_modules", ("q_proj", "v_proj")),
        ("model: {name: m, revision: 12345e7}", "model.revision", "12345e7"),
        ("model: {name: m, revision: 0123}", "model.revision", "0123"),
        ("model: {name: m, kernels: null}", "model.kernels", "none"),
        ("data: {train: a, columns: {prompt: q, completion: 1}}", "data.columns", {"prompt": "q", "completion": "1"}),
        ("data: {train: {path: a}}", "data.train.0.path", None),
    ],
)
def test_a_file_may_write_values_loosely(line: str, key: str, value: object) -> None:
    section = line.partition(":")[0]
    rest = {"model": "model: {name: m}", "data": "data: {train: a.jsonl}"}
    Path("x.yaml").write_text("\n".join([line, *(text for name, text in rest.items() if name != section)]))
    resolved = resolve(Path("x.yaml"), {})
    if key.endswith("0.path"):
        assert resolved.config.data.train[0].path == "a"  # type: ignore[union-attr]
    else:
        assert resolved.value(key) == value


def test_anchors_and_merge_keys_work_and_keep_lines(resolve_text: ResolveText) -> None:
    text = """\
    train: &shared
      <<: {epochs: 2, seed: 7}
      seed: 1
    """
    resolved = resolve_text(text)
    assert (resolved.config.train.epochs, resolved.config.train.seed) == (2, 1)
    assert resolved.origins["train.seed"].where == "x.yaml:5"
    assert resolved.origins["train.epochs"].where == "x.yaml:4"


def test_an_empty_section_is_no_section(resolve_text: ResolveText) -> None:
    assert resolve_text("train:\n").config.train.epochs == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {seed: 1, seed: 2}\n", "x.yaml:3: seed is given twice, first in line 3"),
        ("train:\n  seed: 1\nrun:\ntrain:\n  seed: 2\n", "x.yaml:6: train is given twice, first in line 3"),
        ("lr: 1e-4\ntrain: {learning_rate: 1}\n", "x.yaml:4: train.learning_rate is given twice: lr at x.yaml:3"),
        ("run: {name: !!python/object/apply:os.system [id]}\n", "x.yaml:3: the tag"),
        ("run: {name: !thing x}\n", "x.yaml:3: the tag !thing is not allowed"),
        ("? [a, b]\n: c\n", "x.yaml:3: a key must be plain text"),
        ("train: 3\n", "x.yaml:3: train is a section: keys are expected under it, not a value"),
        ("train: [1]\n", "x.yaml:3: train is a section: keys are expected under it, not a list"),
        ("tuning: {lora: yes}\n", "x.yaml:3: tuning.lora is a section"),
        ("run: {name: [a\n", "x.yaml:4: not valid YAML"),
        ("run:\n\tname: a\n", "x.yaml:4: not valid YAML"),
        ("---\nrun: {name: a}\n", "not valid YAML"),
        ("data: &a [*a]\n", "x.yaml:3: data is given twice"),
        ("run: {name: *nowhere}\n", "x.yaml:3: not valid YAML"),
        ("run: {name: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[x]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}\n", "nested deeper"),
        ("run: {name: " + "[" * 5000 + "\n", "x.yaml"),
        ("include: 3\n", "x.yaml:3: include takes a path"),
        ("include: []\n", "x.yaml:3: include takes a path"),
        ("warmup_ratio: 1\n", "x.yaml:3: warmup_ratio must be from 0 to below 1"),
        ("warmup_steps: 0.5\n", "x.yaml:3: warmup_steps must be a number of steps"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(error_lines: ErrorLines, text: str, said: str) -> None:
    lines = error_lines(text)
    assert len(lines) == 1
    assert said in lines[0]


def test_alias_bombs_are_refused_quickly(error_lines: ErrorLines) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    lines = error_lines(f"run: {{name: {{{', '.join(levels)}}}}}\n")
    assert any("more than 20000 values" in line for line in lines)


def test_an_anchor_that_contains_itself_is_refused(error_lines: ErrorLines) -> None:
    assert "anchor that contains itself" in error_lines("run: {name: &a {b: *a}}\n")[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "x.yaml: the file is empty"),
        (b"# nothing\n", "x.yaml: the file is empty"),
        (b"null\n", "x.yaml: the file holds no section"),
        (b"- a\n", "x.yaml:1: the file holds a list"),
        (b"hello\n", "x.yaml:1: the file holds a single value"),
        (b"model:\n  name: \xff\n", "x.yaml:2: not UTF-8"),
        (b"model: {name: \x01}\n", "x.yaml:1: not valid YAML"),
        (b"#" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_unusable_files(data: bytes, said: str) -> None:
    Path("x.yaml").write_bytes(data)
    with pytest.raises(SftPlayError) as caught:
        resolve(Path("x.yaml"), {})
    assert len(caught.value.lines()) == 1
    assert said in caught.value.lines()[0]


def test_missing_folder_and_unreadable_paths() -> None:
    Path("demo.yaml").write_text(BASE)
    Path("folder.yaml").mkdir()
    os.mkfifo("pipe.yaml")
    said = {
        "dmeo.yaml": "dmeo.yaml does not exist -> nearest is demo.yaml",
        "folder.yaml": "folder.yaml is a folder",
        "pipe.yaml": "pipe.yaml is not a regular file",
        "demo.yaml/x": "cannot be read",
        "a\0b": "a?b: a path cannot hold a NUL byte",
    }
    for name, text in said.items():
        with pytest.raises(SftPlayError) as caught:
            resolve(Path(name), {})
        assert len(caught.value.lines()) == 1, name
        assert text in caught.value.lines()[0]


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    Path("x.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert resolve(Path("x.yaml"), {}).config.model.name == "some/model"


def test_includes_chain_relative_to_the_including_file() -> None:
    Path("bases/deep").mkdir(parents=True)
    Path("bases/deep/all.yaml").write_text("train: {seed: 1, epochs: 3, logging_steps: 5}\n")
    Path("bases/gpu.yaml").write_text("include: deep/all.yaml\ntrain: {seed: 2, epochs: 2}\n")
    Path("other.yaml").write_text("train: {epochs: 9}\n")
    Path("x.yaml").write_text("include: [bases/gpu.yaml, other.yaml]\n" + BASE + "train: {seed: 4}\n")
    resolved = resolve(Path("x.yaml"), {})
    train = resolved.config.train
    assert (train.seed, train.epochs, train.logging_steps) == (4, 9, 5)
    seed = resolved.origins["train.seed"]
    assert (seed.kind, seed.where) == (OriginKind.FILE, "x.yaml:4")
    chain = [(one.where, one.value) for one in seed.overrode]
    assert chain == [("bases/gpu.yaml:2", 2), ("bases/deep/all.yaml:1", 1), ("default", 42)]
    assert resolved.origins["train.logging_steps"].kind is OriginKind.INCLUDE
    assert [str(path) for path in resolved.files] == ["x.yaml", "bases/gpu.yaml", "bases/deep/all.yaml", "other.yaml"]


def test_required_keys_may_come_from_an_include() -> None:
    Path("base.yaml").write_text("data: {train: a.jsonl}\n")
    Path("x.yaml").write_text("include: base.yaml\nmodel: {name: m}\n")
    assert resolve(Path("x.yaml"), {}).config.data.train == "a.jsonl"


def test_an_include_circle_names_its_chain() -> None:
    Path("a.yaml").write_text("include: b.yaml\n" + BASE)
    Path("b.yaml").write_text("run: {}\ninclude: ./a.yaml\n")
    with pytest.raises(SftPlayError) as caught:
        resolve(Path("a.yaml"), {})
    assert caught.value.lines() == [
        "b.yaml:2: include goes in a circle: a.yaml -> b.yaml -> a.yaml -> remove one of them"
    ]


def test_one_file_included_twice_is_no_circle_and_doubling_is_bounded() -> None:
    Path("0.yaml").write_text("train: {seed: 1}\n")
    for n in range(1, 12):
        Path(f"{n}.yaml").write_text(f"include: [{n - 1}.yaml, {n - 1}.yaml]\n")
    assert not read_files(Path("2.yaml")).errors
    assert "more than 64 files" in read_files(Path("11.yaml")).errors[0].line()


def test_errors_in_an_included_file_carry_its_place() -> None:
    Path("base.yaml").write_text("run: {}\ntrain: {sed: 1}\n")
    Path("x.yaml").write_text("include: [base.yaml, gone.yaml]\n" + BASE)
    with pytest.raises(SftPlayError) as caught:
        resolve(Path("x.yaml"), {})
    first, second = caught.value.lines()
    assert first.startswith("x.yaml:1: gone.yaml does not exist")
    assert second.startswith("base.yaml:2: unknown key train.sed, nearest is train.seed")


_OLD_VALUES = {"tuning.mode": "full", "train.optim": "sgd", "train.scheduler": "linear", "train.eval_strategy": "no"}


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_every_old_name_works_at_the_top_and_in_its_section_and_says_so(name: str) -> None:
    key = KEYS[OLD_NAMES[name]]
    kind = key.type
    value = _OLD_VALUES.get(key.name) or next(
        iter(kind.choices), "3" if kind.number else "true" if kind.boolean else "v"
    )
    if name == "warmup_ratio":
        value = "0.5"
    section = key.section.partition(".")[0]
    prefixes = [""] if key.leaf == name else ["", f"{section}:\n  "]
    for prefix in prefixes:
        Path("x.yaml").write_text(f"{prefix}{name}: {value}\n")
        read = read_files(Path("x.yaml"))
        assert not read.errors
        setting = read.layers[0].settings[key.name]
        assert setting.origin.given_as.endswith(name)
        line = 2 if prefix else 1
        assert read.layers[0].notes == (
            f"x.yaml:{line}: {setting.origin.given_as} is an old name of {key.name}, and was taken as that",
        )


def test_old_names_are_no_keys_of_ours() -> None:
    top_level = set(KEYS) | {key.section for key in KEYS.values()}
    assert not top_level & set(OLD_NAMES)
    assert set(OLD_NAMES.values()) <= set(KEYS)
