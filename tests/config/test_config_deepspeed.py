"""`dist.deepspeed_config`: the file's values become the config's, and what contradicts it is shown with both places."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import BASE, ErrorLines, ResolveText

from sft_play.config import deepspeed_keys as known
from sft_play.config.json_text import line_of, parse_json
from sft_play.config.keys import KEYS
from sft_play.config.rules import refuse_unavailable
from tests.tiny import ROOT

USE = "dist: {deepspeed_config: ds.json}\n"


def write(text: str) -> None:
    Path("ds.json").write_text(text, encoding="utf-8")


def test_stage_offload_and_batch_come_from_the_file(resolve_text: ResolveText) -> None:
    write(
        """{
  // comments, and a comma at the end
  "train_micro_batch_size_per_gpu": 4, /* rows */ "gradient_accumulation_steps": "auto",
  "gradient_clipping": 0.5,
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
    "offload_param": {"device": "nvme", "nvme_path": "/fast"},
  },
  "bf16": {"enabled": true}
}"""
    )
    resolved = resolve_text(USE)
    config = resolved.config
    assert (config.train.batch_size, config.train.grad_accum, config.train.max_grad_norm) == (4, "auto", 0.5)
    assert (config.dist.strategy, config.dist.cpu_offload, config.dist.nvme_path) == ("zero3", "params", "/fast")
    assert config.train.bf16 is True
    places = {name: resolved.origins[name].where for name in ("train.batch_size", "dist.strategy", "train.bf16")}
    assert places == {"train.batch_size": "ds.json:3", "dist.strategy": "ds.json:6", "train.bf16": "ds.json:10"}
    refuse_unavailable(resolved)


def test_the_old_offload_is_understood_and_said(resolve_text: ResolveText) -> None:
    write('{"zero_optimization": {"stage": 2, "cpu_offload": true}}')
    resolved = resolve_text(USE)
    assert resolved.config.dist.cpu_offload == "optimizer"
    (note,) = resolved.notes
    assert note.startswith("ds.json:1: zero_optimization.cpu_offload: true is understood as offload_optimizer")


def test_a_file_may_leave_everything_to_the_plan(resolve_text: ResolveText) -> None:
    write('{"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}')
    resolved = resolve_text(USE + "train: {batch_size: 2}\n")
    assert (resolved.config.dist.strategy, resolved.config.train.batch_size) == ("auto", 2)


def test_optimizer_and_schedule_are_the_configs_own(resolve_text: ResolveText) -> None:
    write(
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4,'
        ' "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1}}, "scheduler": {"type": "WarmupDecayLR", "params":'
        ' {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": "auto"}}}'
    )
    train = resolve_text(USE + "train: {optim: adamw_torch_fused, adam_beta1: 0.9}\n").config.train
    assert (train.learning_rate, train.adam_beta1, train.adam_beta2, train.weight_decay) == (3e-4, 0.9, 0.95, 0.1)
    assert (train.optim, train.scheduler, train.warmup) == ("adamw_torch_fused", "linear", 10)


REFUSED = [
    ('"zero_optimization": {"stage": 3}', "strategy: zero2", "stage: 3 contradicts dist.strategy: zero2 (x.yaml:3)"),
    ('"zero_optimization": {"stage": 3}', "zero_level: 2", "dist.zero_level: 2 contradicts dist.strategy: zero3"),
    ('"zero_optimization": {"stage": 0}', "", "stage 0 shards nothing"),
    ('"zero_optimization": {"stage": 4}', "", "stage takes 1, 2 or 3, not 4"),
    (
        '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}',
        "cpu_offload: optimizer",
        "device: none contradicts dist.cpu_offload: optimizer (x.yaml:3)",
    ),
    ('"zero_optimization": {"offload_param": {"device": "cpu"}}', "", "an optimizer on the GPU is not offered"),
    ('"zero_optimization": {"offload_param": {"devise": "cpu"}}', "", "offload_param.devise, nearest is device"),
    ('"zero_optimization": {"offload_optimizer": {"device": "nvme"}}', "", "device nvme needs nvme_path"),
    ('"zero_optimization": {"overlap_com": true}', "", "zero_optimization.overlap_com, nearest is overlap_comm"),
    ('"zero_optimization": {"zero_quantized_gradients": true}', "", "another curve"),
    ('"zero_optimization": []', "", "zero_optimization takes a mapping"),
    ('"zero_optimisation": {"stage": 2}', "", "no key zero_optimisation, nearest is zero_optimization"),
    ('"steps_per_pint": 5', "", "no key steps_per_pint, nearest is steps_per_print"),
    ('"wandb": {"enabled": true}', "", "wandb cannot be had here -> set run.report_to"),
    ('"optimizer": {"type": "OneBitAdam"}', "", "the optimizer OneBitAdam is not offered"),
    ('"optimizer": {"params": {"beta": [1, 2]}}', "", "optimizer.params.beta, nearest is betas"),
    ('"optimizer": {"params": {"adam_w_mode": false}}', "", "adam_w_mode: false is not offered"),
    ('"scheduler": {"type": "OneCycle"}', "", "the scheduler OneCycle is not offered"),
    ('"scheduler": {"params": {"warmup_type": "log"}}', "", "warmup_type: log is not offered"),
    ('"gradient_clipping": 1, "gradient_clipping": 2', "", "gradient_clipping is given twice"),
    ('"gradient_clipping": ', "", "not valid JSON"),
]


@pytest.mark.parametrize(("text", "dist", "said"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(error_lines: ErrorLines, text: str, dist: str, said: str) -> None:
    write(f"{{\n{text}\n}}")
    more = f", {dist}" if dist else ""
    lines = [line for line in error_lines(f"dist: {{deepspeed_config: ds.json{more}}}\n") if said in line]
    assert len(lines) == 1
    assert lines[0].startswith("ds.json") or "zero_level" in said
    assert " -> " in lines[0]


def test_a_batch_that_contradicts_the_config_shows_both_values_and_both_places(error_lines: ErrorLines) -> None:
    write('{\n"train_micro_batch_size_per_gpu": 4,\n"zero_optimization": {"stage": 2}\n}')
    (line,) = error_lines(USE + "train: {batch_size: 2}\n")
    assert line.startswith(
        "ds.json:2: train_micro_batch_size_per_gpu: 4 contradicts train.batch_size: 2 (x.yaml:4) -> "
    )
    (line,) = error_lines(USE, TRAIN_BATCH_SIZE="8")
    assert "contradicts train.batch_size: 8 (environment TRAIN_BATCH_SIZE)" in line


@pytest.mark.parametrize("path", sorted((ROOT / "deepspeed_configs").glob("*.json")), ids=lambda path: path.name)
def test_every_shipped_file_can_be_given(resolve_text: ResolveText, path: Path) -> None:
    resolved = resolve_text(DEEPSPEED_CONFIG=str(path), DIST_NVME_PATH="/fast") if "nvme" in path.name else None
    resolved = resolved or resolve_text(DEEPSPEED_CONFIG=str(path))
    assert resolved.config.dist.strategy == path.stem.partition("_")[0]
    offload = {"zero2_offload": "optimizer", "zero3_offload": "params", "zero3_nvme": "params"}
    assert resolved.config.dist.cpu_offload == offload.get(path.stem, "none")
    refuse_unavailable(resolved)


def test_a_missing_file_is_said_where_it_was_named(error_lines: ErrorLines) -> None:
    (line,) = error_lines("", base=BASE, DEEPSPEED_CONFIG="nowhere.json")
    assert line.startswith("environment DEEPSPEED_CONFIG: nowhere.json does not exist")


def test_the_lists_of_keys_are_deepspeeds_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig as Optimizer
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as Parameters

    fields = DeepSpeedZeroConfig.model_fields
    assert set(known.ZERO) == {field.alias or name for name, field in fields.items()}
    assert set(known.OFFLOAD) == {*Optimizer.model_fields, *Parameters.model_fields}
    assert set(known.ZERO_REFUSED) <= set(known.ZERO)
    assert not set(known.PASSED) & set(known.REFUSED)
    assert set(known.MAPPED.values()) <= set(KEYS)


def test_a_key_in_a_comment_or_a_string_is_not_taken_for_a_key() -> None:
    text = '{\n// "stage": 1\n"note": "stage: 2",\n"zero_optimization": {\n  "stage": 3}}'
    assert parse_json(text)["zero_optimization"]["stage"] == 3
    assert line_of(text, "zero_optimization", "stage") == 5
    assert line_of(text, "zero_optimization", "nothing") == 4
