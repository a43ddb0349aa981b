"""Variables: typed by the schema, aliases, slips, and what is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written import ErrorLines, ResolveText

from sft_play.config.environment import COMMAND_INPUTS, INPUTS_OF, check_inputs, read_environment
from sft_play.config.keys import KEYS, VARIABLE_ALIASES, VARIABLES
from sft_play.config.origin import OriginKind
from sft_play.config.resolve import overrides, resolve
from sft_play.config.values import parse_text, show
from sft_play.errors import SeveralErrors


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TRAIN_BATCH_SIZE", "1", 1),
        ("TRAIN_BATCH_SIZE", "auto", "auto"),
        ("TRAIN_LEARNING_RATE", "1e-4", 1e-4),
        ("TRAIN_LEARNING_RATE", " .5 ", 0.5),
        ("TRAIN_MAX_STEPS", "none", None),
        ("TRAIN_MAX_STEPS", "1e3", 1000),
        ("TUNING_LORA_R", "64", 64),
        ("TUNING_LORA_TARGET_MODULES", "q_proj,v_proj", ("q_proj", "v_proj")),
        ("TUNING_LORA_TARGET_MODULES", "all-linear", "all-linear"),
        ("TUNING_LORA_MODULES_TO_SAVE", "lm_head", ("lm_head",)),
        ("DATA_SPLIT_TEST", "0.1", 0.1),
        ("DATA_TRAIN", "a.jsonl", "a.jsonl"),
        ("DATA_TRAIN", "a.jsonl, b.jsonl", ("a.jsonl", "b.jsonl")),
        ("DATA_TRAIN", '["a,b.jsonl"]', ("a,b.jsonl",)),
        ("DATA_TEST", "none", None),
        ("DATA_COLUMNS", "prompt=q,completion=a", {"prompt": "q", "completion": "a"}),
        ("DATA_COLUMNS", '{"prompt": "q=1"}', {"prompt": "q=1"}),
        ("RUN_REPORT_TO", "none", ()),
        ("RUN_REPORT_TO", "tensorboard", ("tensorboard",)),
        ("RUN_NAME", "007", "007"),
        ("TRAIN_EVAL_STRATEGY", "no", "no"),
        ("DIST_CPU_OFFLOAD", "none", "none"),
        ("DIST_ZERO_LEVEL", "3", 3),
        ("DIST_GPUS", "all", "all"),
        ("DIST_GPUS", "0,1", (0, 1)),
        ("DIST_GPUS", "[2]", (2,)),
        ("NUM_GPUS", "2", 2),
        ("NCCL_TIMEOUT", "60", 60),
        *[("TRAIN_BF16", text, True) for text in ("true", "1", "yes", "on", "TRUE")],
        *[("TRAIN_BF16", text, False) for text in ("false", "0", "no", "off", "Off")],
    ],
)
def test_text_is_typed_by_the_schema(resolve_text: ResolveText, variable: str, text: str, value: object) -> None:
    base = "model: {name: some/model}\ndata: {train: c.jsonl}\n"
    resolved = resolve_text(base=base, **{variable: text})
    key = VARIABLE_ALIASES.get(variable) or next(one.name for one in KEYS.values() if one.variable == variable)
    assert resolved.value(key) == value
    assert type(resolved.value(key)) is type(value)
    origin = resolved.origins[key]
    assert (origin.kind, origin.where) == (OriginKind.ENVIRONMENT, f"environment {variable}")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("TRAIN_BATCH_SIZE", "abc", "TRAIN_BATCH_SIZE=abc: train.batch_size takes a whole number (1 or more) or auto"),
        (
            "TRAIN_BATCH_SIZE",
            "0",
            "TRAIN_BATCH_SIZE=0: train.batch_size takes a whole number (1 or more) or auto, not 0",
        ),
        ("TRAIN_BATCH_SIZE", "1.5", "not 1.5"),
        ("TRAIN_BATCH_SIZE", "true", 'not "true"'),
        ("TRAIN_LEARNING_RATE", "nan", 'not "nan"'),
        ("TRAIN_LEARNING_RATE", "1e999", "takes a number (0 or more)"),
        ("TRAIN_FP16", "maybe", "takes true or false"),
        ("TUNING_MODE", "qlra", "nearest is qlora"),
        ("DATA_COLUMNS", "prompt", "takes a mapping"),
        ("DIST_ZERO_LEVEL", "4", "one of 1, 2, 3 or none"),
        ("NUM_GPUS", "many", "NUM_GPUS=many: NUM_GPUS (dist.gpus) takes"),
        ("RUN_REPORT_TO", "tensorbord", "nearest is tensorboard"),
        ("RUN_NAME", "", "RUN_NAME=: the variable is empty"),
    ],
)
def test_wrong_text_is_said_with_its_variable(error_lines: ErrorLines, variable: str, text: str, said: str) -> None:
    lines = error_lines(**{variable: text})
    assert len(lines) == 1
    assert said in lines[0]


def test_two_variables_for_one_key_must_agree(error_lines: ErrorLines, resolve_text: ResolveText) -> None:
    assert resolve_text(NUM_GPUS="1", DIST_GPUS="1").config.dist.gpus == 1
    (line,) = error_lines(NUM_GPUS="1", DIST_GPUS="2")
    assert "DIST_GPUS" in line
    assert "NUM_GPUS" in line
    assert "both set dist.gpus" in line


def test_make_variables_must_be_known(error_lines: ErrorLines) -> None:
    given = "CONFIG TRAIN_BATCHSIZE LR RUNNS HF_HOME NCCL_DEBUG TRAIN_SEED FOO"
    lines = error_lines(TRAIN_BATCHSIZE="1", LR="1", TRAIN_SEED="1", FOO="x", SFT_PLAY_MAKE_VARIABLES=given)
    assert [line.partition(":")[0] for line in lines] == ["TRAIN_BATCHSIZE", "LR", "RUNNS", "FOO"]
    assert "nearest is TRAIN_BATCH_SIZE" in lines[0]
    assert "nearest is TRAIN_LEARNING_RATE" in lines[1]
    assert "nearest is RUNS" in lines[2]
    assert "docs/configuration.md" in lines[3]


def test_a_value_of_an_unknown_variable_is_never_repeated(error_lines: ErrorLines) -> None:
    lines = error_lines(TRAIN_RUN="$(shell touch PWNED)", SFT_PLAY_MAKE_VARIABLES="TRAIN_RUN")
    assert "PWNED" not in lines[0]


def test_inputs_of_the_calling_command_are_known() -> None:
    environ = {"SFT_PLAY_MAKE_VARIABLES": "PROMPTS"}
    assert read_environment(environ).errors
    assert not read_environment(environ, inputs=["PROMPTS"]).errors


def test_another_commands_inputs_are_refused_on_the_command_line_only(resolve_text: ResolveText) -> None:
    Path("x.yaml").write_text("model: {name: some/model}\ndata: {train: a}\n")
    environ = {"RUN": "r", "CONFIG": "x.yaml", "SPLIT": "s"}
    assert not resolve(Path("x.yaml"), environ, inputs=INPUTS_OF["train"]).warnings
    line = {**environ, "SFT_PLAY_MAKE_VARIABLES": "CONFIG RUN SPLIT TRAIN_SEED HF_HOME TORCH_INDEX PYTHON"}
    assert resolve(Path("x.yaml"), {**line, "TRAIN_SEED": "1"}).config.train.seed == 1
    with pytest.raises(SeveralErrors) as caught:
        resolve(Path("x.yaml"), {**line, "TRAIN_SEED": "1"}, inputs=INPUTS_OF["train"])
    assert caught.value.lines() == [
        "RUN: is no input of this command -> make eval, infer, serve, chat, merge, export, push and report read it; "
        "this one reads CONFIG, ARGS, PYTHON",
        "SPLIT: is no input of this command -> make eval reads it; this one reads CONFIG, ARGS, PYTHON",
    ]


def test_a_command_without_a_config_refuses_what_it_does_not_read() -> None:
    names = "RUN RUNN CONFIG TRAIN_SEED NCCL_DEBUG ARGS"
    with pytest.raises(SeveralErrors) as caught:
        check_inputs({"SFT_PLAY_MAKE_VARIABLES": names, "SPLIT": "x"}, INPUTS_OF["infer"])
    reads = "this one reads RUN, MODEL, ADAPTER, ARGS, PYTHON"
    (*most, last) = [name for name, names in INPUTS_OF.items() if "CONFIG" in names]
    readers = f"make {', '.join(most)} and {last} read it"
    assert caught.value.lines() == [
        f"RUNN: is no input of this command, nearest is RUN -> {reads}",
        f"CONFIG: is no input of this command -> {readers}; {reads}",
        f"TRAIN_SEED: is no input of this command -> {reads}",
    ]
    check_inputs({"SFT_PLAY_MAKE_VARIABLES": "RUN ARGS", "TRAIN_SEED": "x"}, INPUTS_OF["infer"])
    check_inputs({}, ())


def test_every_commands_inputs_are_inputs() -> None:
    """Or keys: a command without a config reads a few of them by themselves."""
    assert {name for names in INPUTS_OF.values() for name in names} <= {*COMMAND_INPUTS, *VARIABLES}
    assert not set(COMMAND_INPUTS) & set(VARIABLES)


def test_inputs_can_be_checked_before_anything_is_installed() -> None:
    code = "import sys; sys.modules['pydantic'] = sys.modules['yaml'] = None; import sft_play.config.inputs"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_slip_in_the_environment_is_a_warning_and_strict_env_makes_it_an_error(
    resolve_text: ResolveText, error_lines: ErrorLines
) -> None:
    resolved = resolve_text(TRAIN_BATCHSIZE="1", train_seed="3", PATH="/bin", MY_TOOL="x")
    assert len(resolved.warnings) == 2
    assert resolved.warnings[0].startswith("TRAIN_BATCHSIZE: ")
    assert "nearest is TRAIN_BATCH_SIZE" in resolved.warnings[0]
    assert "nearest is TRAIN_SEED" in resolved.warnings[1]
    assert resolved.config.train.batch_size == "auto"
    (line,) = error_lines("run: {strict_env: true}\n", TRAIN_BATCHSIZE="1")
    assert line.startswith("TRAIN_BATCHSIZE: ")
    assert len(error_lines(RUN_STRICT_ENV="yes", TRAIN_BATCHSIZE="1")) == 1


def test_the_stacks_own_variables_and_inputs_are_left_alone(resolve_text: ResolveText) -> None:
    names = ["NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "OMP_NUM_THREADS", "MASTER_PORT", "RUN", "DATA", "MODEL"]
    resolved = resolve_text(**dict.fromkeys(names, "x"))
    assert not resolved.warnings
    assert not overrides(resolved)
    assert "x" not in {origin.value for origin in resolved.origins.values() if not isinstance(origin.value, dict)}


def test_every_override_of_the_environment_is_told(resolve_text: ResolveText) -> None:
    resolved = resolve_text("train: {batch_size: 4}\n", TRAIN_BATCH_SIZE="1", NUM_GPUS="1", MODEL_NAME="n")
    assert overrides(resolved) == (
        "model.name = n from MODEL_NAME (instead of some/model, x.yaml:1)",
        "train.batch_size = 1 from TRAIN_BATCH_SIZE (instead of 4, x.yaml:3)",
        "dist.gpus = 1 from NUM_GPUS (instead of none, default)",
    )


def test_every_key_has_its_own_variable() -> None:
    names = [key.variable for key in KEYS.values()]
    assert len(set(names)) == len(names)
    assert not set(names) & set(VARIABLE_ALIASES)
    assert KEYS["tuning.lora.r"].variable == "TUNING_LORA_R"
    assert KEYS["data.split.validation"].variable == "DATA_SPLIT_VALIDATION"


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_a_shown_number_reads_back_to_the_bit(number: float) -> None:
    assert float(parse_text(KEYS["train.learning_rate"], show(number))) == number


@given(st.lists(st.text(alphabet="abc_.xyz", min_size=1).filter(lambda text: text not in ("none", "null")), min_size=2))
def test_lists_read_back(items: list[str]) -> None:
    assert parse_text(KEYS["data.train"], ",".join(items)) == items
    assert parse_text(KEYS["data.train"], json.dumps(items)) == items


@given(st.sampled_from(sorted(KEYS)), st.text())
def test_no_text_breaks_the_parser(name: str, text: str) -> None:
    parse_text(KEYS[name], text)
