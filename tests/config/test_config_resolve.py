"""Layers, origins, all errors at once, plain words, and secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import BASE, ErrorLines, ResolveText

from sft_play.config.dump import render_config
from sft_play.config.keys import KEYS
from sft_play.config.origin import OriginKind
from sft_play.config.resolve import resolve
from sft_play.config.schema import Config
from sft_play.errors import ExitCode, SeveralErrors, exit_code_of


def test_every_key_has_an_origin_and_defaults_are_the_schemas(resolve_text: ResolveText) -> None:
    resolved = resolve_text()
    assert list(resolved.origins) == list(KEYS)
    written = {"model.name": "x.yaml:1", "data.train": "x.yaml:2", "data.validation": "x.yaml:2"}
    for name, origin in resolved.origins.items():
        assert origin.where == written.get(name, "default")
        assert origin.explicit == (name in written)
    plain = Config.model_validate(
        {"model": {"name": "some/model"}, "data": {"train": "a.jsonl", "validation": "b.jsonl"}}
    )
    assert resolved.config == plain


def test_the_environment_goes_over_the_file_and_remembers_it(resolve_text: ResolveText) -> None:
    resolved = resolve_text("train:\n  learning_rate: 1e-5\n", TRAIN_LEARNING_RATE="1e-3")
    origin = resolved.origins["train.learning_rate"]
    assert (origin.kind, origin.where, origin.value) == (
        OriginKind.ENVIRONMENT,
        "environment TRAIN_LEARNING_RATE",
        1e-3,
    )
    assert [(one.kind, one.where, one.value) for one in origin.overrode] == [
        (OriginKind.FILE, "x.yaml:4", 1e-5),
        (OriginKind.DEFAULT, "default", 2e-4),
    ]


def test_three_mistakes_are_three_errors_each_with_its_line(error_lines: ErrorLines) -> None:
    lines = error_lines("""\
        learning_rate: 3
        train:
          batchsize: 4
          epochs: many
        """)
    assert lines == [
        "x.yaml:3: unknown key learning_rate: `learning_rate` belongs under `train` -> see docs/configuration.md",
        "x.yaml:5: unknown key train.batchsize, nearest is train.batch_size -> see docs/configuration.md",
        'x.yaml:6: train.epochs takes a number above 0, not "many" -> see docs/configuration.md',
    ]


def test_files_variables_values_and_rules_are_reported_together_once_each(error_lines: ErrorLines) -> None:
    lines = error_lines(
        """\
        train: {bf16: true, fp16: true, sead: 1, optim: adamw}
        tuning: {mode: full, lora: {r: 4}}
        data.x: 1
        """,
        TRAIN_EPOCHS="abc",
        SFT_PLAY_MAKE_VARIABLES="TRAIN_SEDE",
    )
    starts = [
        "x.yaml:3: unknown key train.sead",
        "x.yaml:3: train.optim takes one of auto",
        "x.yaml:3: train.bf16 and train.fp16 are both true",
        "x.yaml:4: tuning.lora.r has no effect with tuning.mode: full",
        "x.yaml:5: unknown key data.x",
        "TRAIN_SEDE: ",
        "TRAIN_EPOCHS=abc: ",
    ]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_config_errors_exit_with_2() -> None:
    with pytest.raises(SeveralErrors) as caught:
        resolve(Path("gone.yaml"), {})
    assert exit_code_of(caught.value) == ExitCode.CONFIG_OR_DATA


def test_missing_keys_name_the_file_and_the_variable(error_lines: ErrorLines) -> None:
    assert error_lines("train: {}\n", base="") == [
        "x.yaml: model.name is missing -> write name under model in x.yaml, or set MODEL_NAME=...",
        "x.yaml: data.train is missing -> write train under data in x.yaml, or set DATA_TRAIN=...",
    ]
    with pytest.raises(SeveralErrors, match="give CONFIG=path, or set MODEL_NAME"):
        resolve(None, {"DATA_TRAIN": "a"})


def test_a_required_key_that_is_misspelt_is_reported_once(error_lines: ErrorLines) -> None:
    for text in (
        "model: {nme: m}",
        "modle: {name: m}",
        "model: m",
        "name: m",
        "model: {name: !x m}",
        "model: {name: }",
    ):
        (line,) = error_lines(text + "\ndata: {train: a}\n", base="")
        assert line.startswith("x.yaml:1: "), line


def test_partial_leaves_required_keys_open() -> None:
    resolved = resolve(None, {"TRAIN_SEED": "1"}, partial=True)
    assert resolved.origins["model.name"].kind is OriginKind.MISSING
    assert resolved.config.train.seed == 1
    with pytest.raises(SeveralErrors):
        resolve(None, {"TRAIN_SEED": "x"}, partial=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {learning_rate: }", "train.learning_rate takes a number (0 or more), not nothing"),
        ("train: {batch_size: true}", "train.batch_size takes a whole number (1 or more) or auto, not true"),
        ("train: {batch_size: [1]}", "not [1]"),
        ("train: {learning_rate: .nan}", "train.learning_rate takes a number (0 or more)"),
        ("train: {eval_strategy: step}", 'takes one of auto, no, steps, epoch, not "step" -> nearest is steps'),
        ("train: {scheduler: cosin}", "nearest is cosine"),
        ("train: {optim: AdamW}", "nearest are adamw_torch"),
        ("torch_dtype: bfloat16", 'torch_dtype (model.dtype) takes one of auto, bf16, fp16, fp32, not "bfloat16"'),
        ("dist: {main_port: 99999}", "takes a whole number from 1 to 65535 or auto, not 99999"),
        ("run: {report_to: [tensorboard, wandbd]}", "nearest is wandb"),
        ("tuning: {lora: {dropout: 1}}", "tuning.lora.dropout takes a number from 0 to below 1, not 1"),
    ],
)
def test_a_wrong_value_is_said_in_plain_words(error_lines: ErrorLines, text: str, said: str) -> None:
    (line,) = error_lines(text + "\n")
    assert line.startswith("x.yaml:3: ")
    assert said in line


def test_a_wrong_data_source_is_said_with_its_own_line(error_lines: ErrorLines) -> None:
    text = """\
    data:
      train:
        - a.jsonl
        - {pth: b.jsonl}
        - path: c.jsonl
          weight: -1
        - {path: d.jsonl, format: shargpt, max_rows: few}
        - {weight: 2}
        - 7.5
        - [x]
    """
    lines = error_lines(text, base="model: {name: m}\n")
    assert [line.partition(" -> ")[0] for line in lines] == [
        "x.yaml:5: unknown key pth in data.train[1], nearest is path",
        "x.yaml:7: data.train[2].weight takes a number above 0, not -1",
        "x.yaml:8: data.train[3].format takes one of auto, messages, sharegpt, alpaca, prompt_completion, "
        'user_assistant, input_target, text, not "shargpt"',
        'x.yaml:8: data.train[3].max_rows takes a whole number (1 or more) or none, not "few"',
        "x.yaml:9: data.train[4] has no path",
        'x.yaml:11: data.train[6] takes a path, a hub id or {path: ...}, not ["x"]',
    ]


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "aB3" * 11,
        "sk-" + "aB3" * 11,
        "sk-proj-" + "aB3" * 11,
        "ghp_" + "a1B2" * 9,
        "https://me:secret-word@example.org/data.jsonl",
        "s3://key:secret@bucket/x",
    ],
)
def test_secrets_are_refused_and_never_repeated(error_lines: ErrorLines, value: str) -> None:
    for lines in (
        error_lines(f"run: {{name: '{value}'}}\n"),
        error_lines(RUN_NAME=value),
        error_lines(f"data: {{train: [a, {{path: '{value}'}}]}}\n", base="model: {name: m}\n"),
        error_lines(f"data: {{train: a, columns: {{prompt: '{value}'}}}}\n", base="model: {name: m}\n"),
        error_lines(f"train: {{seed: '{value}'}}\n"),
        error_lines(TRAIN_SEED=value),
    ):
        (line,) = lines
        assert "secrets belong in the environment" in line
        assert value not in line


def test_ordinary_names_are_no_secrets(resolve_text: ResolveText) -> None:
    for name in ("hf-internal-testing/tiny", "data/hf_datasets_of_mine", "sk-learn/docs", "https://example.org:80/a@b"):
        assert resolve_text(base=f"model: {{name: '{name}'}}\ndata: {{train: a}}\n").config.model.name == name


def test_credentials_of_the_environment_reach_no_value_and_no_warning(resolve_text: ResolveText) -> None:
    token = "hf_" + "aB3" * 11
    resolved = resolve_text(HF_TOKEN=token, WANDB_API_KEY=token)
    assert token not in repr(resolved)


def test_a_resolved_config_cannot_be_changed(resolve_text: ResolveText) -> None:
    resolved = resolve_text()
    with pytest.raises(ValueError):
        resolved.config.train.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        resolved.origins["train.seed"] = resolved.origins["model.name"]  # type: ignore[index]


def test_what_is_written_back_resolves_to_the_same_config(resolve_text: ResolveText) -> None:
    text = """\
    train: {learning_rate: 1e-8, eval_strategy: no, bf16: false, max_steps: 7}
    tuning: {mode: qlora, lora: {target_modules: [q_proj], alpha: 3}}
    dist: {gpus: [0]}
    """
    resolved = resolve_text(
        text, DATA_TRAIN='["a,b",{"path":"c","max_rows":3}]', DATA_COLUMNS="prompt=no,b=1e3", RUN_NAME="7"
    )
    written = render_config(resolved)
    assert "# from environment RUN_NAME" in written
    assert "# from x.yaml:3" in written
    Path("again.yaml").write_text(written)
    assert resolve(Path("again.yaml"), {}).config == resolved.config


_NAMES = st.text(alphabet="abcdefghij_.:-[]{}'\"#&*!|>%@`\n\t 0123456789", max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(_NAMES)
def test_no_text_in_a_file_breaks_the_reader(text: str) -> None:
    Path("f.yaml").write_text(BASE + text)
    lines: list[str] = []
    try:
        resolve(Path("f.yaml"), {})
    except SeveralErrors as error:
        lines = error.lines()
    assert all(line and "\n" not in line for line in lines)
