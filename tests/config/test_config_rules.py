"""Each rule between keys refuses what it should, at its line, and leaves the right config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import ErrorLines, ResolveText

from sft_play.config import data_rules, dist_rules, eval_rules, rules, speed_rules, unsloth_rules
from sft_play.config.rules import RULES

_NO_ROWS = "model: {name: m}\ndata: {train: a.jsonl}\n"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"

# rule, lines after a base of two lines, what the error says (without its place)
REFUSED = [
    ("one_precision", "train: {bf16: true, fp16: true}", "train.bf16 and train.fp16 are both true"),
    ("no_half_masters", "tuning: {mode: full}\ntorch_dtype: bf16", "model.dtype: bf16 cannot be trained whole"),
    ("no_half_masters", "tuning: {mode: full}\ntorch_dtype: fp16", "small updates are lost in 16 bits"),
    ("scaled_learning_rate", "train: {lr_scaling: sqrt}", "train.lr_scaling: sqrt needs train.lr_base_batch"),
    (
        "scaled_learning_rate",
        "train: {lr_base_batch: 8}",
        "train.lr_base_batch has no effect with train.lr_scaling: none",
    ),
    ("quantization_under_qlora", "tuning: {quantization: {type: nf4}}", "has no effect with tuning.mode: lora"),
    ("unsloth_trains_adapters", "tuning: {backend: unsloth, mode: full}", "trains adapters, and tuning.mode"),
    ("unsloth_replaces", "tuning: {backend: unsloth}\ntrain: {torch_compile: true}", "compiles what pays itself"),
    (
        "unsloth_replaces",
        "tuning: {backend: unsloth, lora: {use_dora: true}}",
        "tuning.lora.use_dora: true does not go",
    ),
    ("unsloth_replaces", "tuning: {backend: unsloth}\ntrain: {loss: chunked}", "train.loss: chunked does not go with"),
    ("unsloth_keeps_weights_whole", "tuning: {backend: unsloth}\ndist: {strategy: fsdp}", "one GPU, or DDP"),
    ("unsloth_keeps_weights_whole", "tuning: {backend: unsloth}\ndist: {zero_level: 2}", "dist.zero_level: 2 does not"),
    ("adapter_under_full", "tuning: {mode: full, lora: {r: 16}}", "tuning.lora.r has no effect with tuning.mode: full"),
    ("adapter_has_targets", "tuning: {lora: {target_modules: []}}", "nothing would be trained"),
    ("steps_or_epochs", "train: {max_steps: 9, epochs: 1}", "train.epochs has no effect with train.max_steps: 9"),
    ("batch_divides", "train: {global_batch_size: 10, batch_size: 4}", "batch_size: 4 does not divide"),
    ("batch_divides", "train: {global_batch_size: 8, batch_size: 4, grad_accum: 3}", "does not divide"),
    (
        "batch_divides",
        "train: {global_batch_size: 8, batch_size: 2, grad_accum: 2}\ngpus: 1",
        "is not train.global_batch",
    ),
    ("evaluation_has_rows", "train: {eval_strategy: epoch}", "train.eval_strategy: epoch needs validation rows"),
    ("evaluation_has_rows", "train: {eval_on_start: true}", "train.eval_on_start: true needs evaluation"),
    ("evaluation_steps", "data.train: 0\ntrain: {eval_strategy: steps}", "needs train.eval_steps"),
    ("evaluation_steps", "train: {eval_steps: 5}", "train.eval_steps has no effect with train.eval_strategy: auto"),
    ("evaluation_settings_used", "train: {eval_strategy: no, eval_max_rows: 5}", "train.eval_max_rows has no effect"),
    ("evaluation_settings_used", "train: {predict_with_generate: true}", "needs validation rows"),
    ("generation_settings_used", "train: {generation_num_beams: 4}", "with train.predict_with_generate: false"),
    (
        "generation_settings_used",
        "train: {predict_with_generate: true, generation_temperature: 0.5}",
        "do_sample: false",
    ),
    ("best_model", "train: {load_best_model_at_end: true}", "train.load_best_model_at_end: true needs evaluation"),
    ("best_model", "train: {metric_for_best_model: eval_loss}", "metric_for_best_model: eval_loss needs evaluation"),
    ("best_model", "train: {greater_is_better: true}", "train.greater_is_better has no effect"),
    ("known_metric", "train: {metric_for_best_model: bleu}", "no evaluation gives 'bleu'"),
    ("known_metric", "train: {metric_for_best_model: eval_rougel}", "did you mean rougeL?"),
    ("known_metric", "train: {metric_for_best_model: rougeL}", "metric_for_best_model: rougeL needs generated answers"),
    ("generation_settings_used", "train: {eval_rouge_tokenizer: unicode}", "train.eval_rouge_tokenizer has no effect"),
    ("early_stopping", "train: {early_stopping_patience: 2}", "train.early_stopping_patience: 2 needs a metric"),
    ("early_stopping", "train: {early_stopping_patience: 2}", "train.early_stopping_patience: 2 needs evaluation"),
    ("early_stopping", "train: {early_stopping_threshold: 0.1}", "train.early_stopping_threshold has no effect"),
    (
        "smoothing_needs_all_logits",
        "train: {loss: chunked, label_smoothing: 0.1}",
        "train.loss: chunked does not go with train.label_smoothing: 0.1",
    ),
    (
        "offload_or_compile",
        "train: {activation_offloading: true, torch_compile: true}",
        "train.activation_offloading: true does not go with train.torch_compile: true",
    ),
    ("fp8_trains_whole_weights", "train: {fp8: true}", "train.fp8: true does not go with tuning.mode: lora"),
    (
        "fp8_trains_whole_weights",
        "tuning: {mode: full}\ntrain: {fp8: true, fp16: true}",
        "train.fp8: true does not go with train.fp16: true",
    ),
    (
        "fp8_trains_whole_weights",
        "tuning: {mode: full}\ntrain: {fp8: true, bf16: false}",
        "train.fp8: true does not go with train.bf16: false",
    ),
    ("saving_settings_used", "train: {save_strategy: epoch, save_steps: 5}", "with train.save_strategy: epoch"),
    ("saving_settings_used", "train: {save_strategy: no, save_total_limit: 5}", "with train.save_strategy: no"),
    ("optimizer_settings_used", "train: {optim: sgd, adam_beta1: 0.8}", "with train.optim: sgd"),
    ("loader_workers", "train: {dataloader_prefetch_factor: 2}", "with train.dataloader_num_workers: 0"),
    ("has_training_data", "run: {}\nvalidation_file: ''", "data.validation is empty"),
    ("run_name_is_a_folder", "run: {name: ../x}", "run.name names a folder"),
    ("run_name_is_a_folder", "run: {name: ''}", "run.name names a folder"),
    ("zero_level_fits", "dist: {strategy: ddp, zero_level: 2}", "zero_level: 2 contradicts dist.strategy: ddp"),
    ("zero_level_fits", "dist: {strategy: zero3, zero_level: 2}", "contradicts dist.strategy: zero3"),
    ("sharding_fits", "dist: {strategy: ddp, shard_weights: true}", "shard_weights: true contradicts"),
    ("sharding_fits", "dist: {strategy: zero1, shard_gradients: true}", "shard_gradients: true contradicts"),
    ("sharding_fits", "dist: {zero_level: 2, shard_weights: true}", "shard_weights: true contradicts dist.zero_level"),
    ("sharding_fits", "dist: {sharding_factor: 2, shard_gradients: false}", "contradicts dist.sharding_factor: 2"),
    ("sharding_factor_fits", "dist: {zero_level: 3, sharding_factor: 2}", "contradicts dist.zero_level: 3"),
    ("sharding_factor_fits", "dist: {strategy: hsdp}", "dist.strategy: hsdp needs dist.sharding_factor"),
    ("sharding_factor_fits", "dist: {strategy: ddp, sharding_factor: all}", "sharding_factor: all contradicts"),
    ("offload_fits", "dist: {strategy: ddp, cpu_offload: optimizer}", "cpu_offload: optimizer contradicts"),
    ("offload_fits", "dist: {strategy: zero2, cpu_offload: params}", "cpu_offload: params contradicts"),
    ("offload_fits", "dist: {nvme_path: /x}", "dist.nvme_path has no effect with dist.cpu_offload: none"),
    ("offload_fits", "dist: {strategy: zero2, cpu_offload: optimizer, nvme_path: /x}", "nvme_path: /x contradicts"),
    ("deepspeed_file_used", "dist: {strategy: fsdp, deepspeed_config: d.json}", "deepspeed_config: d.json contradicts"),
    ("gpus_fit", "dist: {gpus: [1, 1]}", "dist.gpus: [1, 1] names a GPU twice"),
    ("gpus_fit", "dist: {gpus: []}", "dist.gpus is an empty list"),
    ("gpus_fit", "dist: {strategy: single, gpus: 2}", "dist.gpus: 2 contradicts dist.strategy: single"),
    ("nodes_fit", "dist: {node_rank: 1}", "dist.node_rank: 1 is out of range with dist.num_nodes: 1"),
    ("nodes_fit", "dist: {main_address: a}", "dist.main_address has no effect with dist.num_nodes: 1"),
    ("nodes_fit", "dist: {num_nodes: 2, main_port: 29500}", "dist.num_nodes: 2 needs dist.main_address"),
    ("nodes_fit", "dist: {num_nodes: 2, main_address: a}", "dist.num_nodes: 2 needs a fixed dist.main_port"),
    (
        "one_way_of_communication",
        "dist: {all_to_all_reduce: true, copy_engine_all_gather: true}",
        "dist.copy_engine_all_gather: true and dist.all_to_all_reduce: true exclude each other",
    ),
    ("offload_fits", "dist: {strategy: fsdp, cpu_offload: optimizer}", "optimizer state together"),
    ("one_timeout", "train: {ddp_timeout: 5}\ndist: {timeout_seconds: 6}", "train.ddp_timeout: 5 contradicts"),
]


# The same, with a data section of their own.
DATA_REFUSED = [
    ("endless_streams", "data: {train: a, streaming: true}", "data.streaming: true needs train.max_steps"),
    (
        "endless_streams",
        "data: {train: a, streaming: true, split: {test: 0.1}}\ntrain: {max_steps: 3}",
        "data.split.test has no effect with data.streaming: true",
    ),
    (
        "endless_streams",
        "data: {train: a, streaming: true, max_rows: 9}\ntrain: {max_steps: 3}",
        "data.max_rows has no effect with data.streaming: true",
    ),
    (
        "endless_streams",
        "data: {train: a, streaming: true}\ntrain: {max_steps: 3, dataloader_num_workers: 2}",
        "one worker reads a stream ahead of training",
    ),
    ("weights_of_all_or_none", "data: {train: [{path: a, weight: 1}, b]}", "some sources of data.train have a weight"),
    ("weights_of_all_or_none", "data: {train: a, test: [{path: a, weight: 1}]}", "data.test has a weight"),
    ("texts_of_cpt", "data: {train: a, task: cpt, loss_on: last}", "data.loss_on has no effect with data.task: cpt"),
    ("texts_of_cpt", "data: {train: a, task: cpt, format: alpaca}", "data.format: alpaca with data.task: cpt"),
    (
        "texts_of_cpt",
        "data: {train: a, cross_documents: true}",
        "data.cross_documents has no effect with data.task: sft",
    ),
    (
        "texts_of_cpt",
        "data: {train: a, task: cpt, cross_documents: true, on_overlong: drop}",
        "data.on_overlong has no effect with data.cross_documents: true",
    ),
    (
        "rows_to_group",
        "data: {train: a, packing: true}\ntrain: {group_by_length: true}",
        "train.group_by_length has no effect with data.packing: true",
    ),
]


@pytest.mark.parametrize(("rule", "text", "said"), REFUSED)
def test_a_rule_refuses(error_lines: ErrorLines, rule: str, text: str, said: str) -> None:
    lines = [line for line in error_lines(text + "\n", base=_NO_ROWS) if said in line]
    assert len(lines) == 1
    assert lines[0].startswith("x.yaml:")
    assert " -> " in lines[0]


@pytest.mark.parametrize(("rule", "text", "said"), DATA_REFUSED)
def test_a_rule_of_the_data_section_refuses(error_lines: ErrorLines, rule: str, text: str, said: str) -> None:
    (line,) = error_lines(text + "\n", base="model: {name: m}\n")
    assert said in line
    assert " -> " in line


def test_every_rule_is_tried_here() -> None:
    tried = {rule for rule, _, _ in [*REFUSED, *DATA_REFUSED]} | {
        "pinned_remote_code",
        "revision_of_a_hub_model",
        "best_model_is_saved",
        "split_used",
        "unsloth_dropout",
    }
    assert {rule.__name__ for rule in RULES} == tried
    assert all(
        any(hasattr(module, name) for module in (rules, data_rules, dist_rules, eval_rules, speed_rules, unsloth_rules))
        for name in tried
    )


@pytest.mark.parametrize(
    "text",
    [
        "train: {bf16: true, fp16: false}",
        "train: {fp16: true}",
        "train: {lr_scaling: linear, lr_base_batch: 8}",
        "tuning: {mode: qlora, quantization: {type: fp4}, lora: {r: 4}}",
        "tuning: {mode: full}",
        "train: {max_steps: 9}",
        "train: {global_batch_size: 12, batch_size: 4, grad_accum: auto}",
        "train: {global_batch_size: 8, batch_size: 4, grad_accum: 2}\ngpus: 1",
        "train: {eval_strategy: steps, eval_steps: 10, eval_on_start: true, eval_max_rows: 5}",
        "train: {predict_with_generate: true, generation_do_sample: true, generation_temperature: 0.5}",
        "train: {early_stopping_patience: 2, metric_for_best_model: eval_loss, early_stopping_threshold: 0.1}",
        "train: {save_strategy: no}",
        "train: {dataloader_num_workers: 2, dataloader_prefetch_factor: 2}",
        "train: {generation_temperature: 1.0, early_stopping_threshold: 0.0, adam_beta1: 0.9, optim: sgd}",
        "dist: {strategy: zero2, zero_level: 2, cpu_offload: optimizer}",
        "dist: {strategy: hsdp, sharding_factor: 2, shard_weights: true}",
        "dist: {strategy: fsdp, sharding_factor: all}",
        "dist: {num_nodes: 2, node_rank: 1, main_address: a, main_port: 29500, gpus: all}",
        "run: {name: a-b_c.1}",
    ],
)
def test_what_goes_together_is_left_alone(resolve_text: ResolveText, text: str) -> None:
    assert not [note for note in resolve_text(text + "\n").notes if "old name" not in note]


def test_remote_code_needs_a_pinned_commit(error_lines: ErrorLines, resolve_text: ResolveText) -> None:
    def base(name: str, revision: str) -> str:
        return f"model: {{name: {name}, trust_remote_code: true, revision: {revision}}}\ndata: {{train: a}}\n"

    for revision in ("none", "main", _COMMIT[:-1], "g" * 40):
        (line,) = error_lines(base=base("some/model", revision))
        assert line.startswith("x.yaml:1: model.trust_remote_code: true needs a pinned revision")
    assert resolve_text(base=base("some/model", f"'{_COMMIT}'")).config.model.trust_remote_code
    assert resolve_text(base=base("./models/mine", "none")).config.model.trust_remote_code


def test_a_folder_has_no_revision(error_lines: ErrorLines, resolve_text: ResolveText) -> None:
    def base(name: str) -> str:
        return f"model: {{name: {name}, revision: main}}\ndata: {{train: a}}\n"

    Path("models/here").mkdir(parents=True)
    for name in ("./mine", "/models/mine", "~/mine", "some/deep/folder", "models/here"):
        (line,) = error_lines(base=base(name))
        assert line.startswith(f"x.yaml:1: model.revision: main for the folder {name}: ")
        assert "a folder has no revision" in line
    assert resolve_text(base=base("some/model")).config.model.revision == "main"


def test_code_in_a_folder_that_is_there_needs_no_pin(resolve_text: ResolveText) -> None:
    Path("models/here").mkdir(parents=True)
    base = "model: {name: models/here, trust_remote_code: true}\ndata: {train: a}\n"
    assert resolve_text(base=base).config.model.trust_remote_code


@pytest.mark.parametrize("text", ["tuning: {mode: full}\ntorch_dtype: fp32", "tuning: {mode: lora}\ntorch_dtype: fp16"])
def test_other_types_are_left_alone(resolve_text: ResolveText, text: str) -> None:
    assert resolve_text(text + "\n")


def test_the_best_model_must_be_saved_where_it_is_evaluated(error_lines: ErrorLines, resolve_text: ResolveText) -> None:
    best = "load_best_model_at_end: true"
    for wrong in ("", ", save_strategy: no", ", eval_strategy: steps, eval_steps: 30, save_steps: 100"):
        (line,) = error_lines(f"train: {{{best}{wrong}}}\n")
        assert "so the best may not be saved" in line
    for right in (", save_strategy: epoch", ", eval_strategy: steps, eval_steps: 50, save_steps: 100"):
        assert resolve_text(f"train: {{{best}{right}}}\n")


def test_a_split_is_used_and_leaves_rows(error_lines: ErrorLines) -> None:
    (line,) = error_lines(base="model: {name: m}\ndata: {train: a, validation: b, split: {validation: 0.1}}\n")
    assert "data.split.validation has no effect with data.validation: b" in line
    (line,) = error_lines(base="model: {name: m}\ndata: {train: a, split: {validation: 0.5, test: 0.5}}\n")
    assert "leave no rows" in line


def test_a_split_counts_as_validation_rows(resolve_text: ResolveText) -> None:
    base = "model: {name: m}\ndata: {train: a, split: {validation: 0.1}}\n"
    assert resolve_text("train: {eval_strategy: epoch}\n", base=base)


def test_a_stronger_layer_that_switches_keys_off_is_noted_not_refused(
    resolve_text: ResolveText, error_lines: ErrorLines
) -> None:
    resolved = resolve_text(
        "tuning: {mode: lora, lora: {r: 4}}\ntrain: {epochs: 2}\n", TUNING_MODE="full", TRAIN_MAX_STEPS="3"
    )
    assert resolved.notes == (
        "x.yaml:3: tuning.lora.r has no effect with tuning.mode: full",
        "x.yaml:4: train.epochs has no effect with train.max_steps: 3",
    )
    (line,) = error_lines("tuning: {mode: full}\n", TUNING_LORA_R="4")
    assert line.startswith("environment TUNING_LORA_R: tuning.lora.r has no effect with tuning.mode: full")


def test_a_rule_about_a_key_that_is_wrong_already_keeps_silent(error_lines: ErrorLines) -> None:
    (line,) = error_lines("tuning: {mode: fulll, quantization: {type: nf4}}\n")
    assert "tuning.mode takes" in line
    base = "model: {name: m}\ndata: {train: a, validatio: b}\n"
    (line,) = error_lines("train: {eval_strategy: epoch}\n", base=base)
    assert "unknown key data.validatio" in line
