"""TensorBoard beside the curves: one chart for all GPUs each, the config, and what the figures mean."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import rewrite_logs

from sft_play.config.schema import Config
from sft_play.config.secrets import redacted
from sft_play.plan.build import Plan

FLUSH_SECONDS = 1.0
RANK_CHARTS = {
    "loss": ("loss", "loss_rank_{}"),
    "tokens a second": ("tokens_per_second", "tokens_per_second_rank_{}"),
    "seconds waiting for data": ("data_seconds_rank_{}",),
    "seconds of forward and backward": ("compute_seconds_rank_{}",),
}
GPU_CHARTS = {
    "memory on the device (GiB), and predicted": ("memory_device_gib_gpu_{}", "memory_predicted_gib"),
    "memory allocated (GiB)": ("memory_allocated_gib_gpu_{}",),
    "memory reserved (GiB)": ("memory_reserved_gib_gpu_{}",),
    "utilisation (%)": ("utilization_percent_gpu_{}",),
    "power (W)": ("power_watts_gpu_{}",),
    "temperature (C)": ("temperature_celsius_gpu_{}",),
    "clock (MHz)": ("clock_mhz_gpu_{}",),
    "throttled": ("throttled_gpu_{}",),
}
STEP = tuple(f"{part}_seconds" for part in ("step", "data", "compute", "wait", "optimizer", "other"))
FORMULAS = """
| figure | what it is |
|---|---|
| `tokens_per_second` | real tokens (no padding) of all ranks over the training time, evaluation and saving left out |
| `mfu_percent` | 100 x tokens/s x FLOPs a token / (FLOP/s of all GPUs); FLOPs a token: {formula} |
| `loss_rank_N` | mean over the answer tokens of rank N; weighted by `loss_share_rank_N` they add up to `loss` |
| `step_seconds` | = data + compute + wait + optimizer + other, of the slowest rank, a step |
| `wait_seconds` | communication that no computation hid (DDP); under other engines it is inside `compute_seconds` |
| `memory_predicted_gib` | what the plan expects on a device at the longest rows |
"""


class BoardCallback(TensorBoardCallback):
    """The Trainer's, but all figures of a step are one event, and events are handed over once a second: waking the
    writer's thread for each figure takes longer than a tiny model's step.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        super().__init__(writer)
        self._held: list[tuple[float, int, dict[str, float]]] = []
        self._flushed = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """What the Trainer was told, and the model's config, without secrets."""
        self.tb_writer.add_text("args", redacted(args.to_json_string()))
        if model is not None:
            self.tb_writer.add_text("model_config", redacted(model.config.to_json_string()))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        values = {name: value for name, value in rewrite_logs(logs).items() if isinstance(value, int | float)}
        self._held.append((time.time(), state.global_step, values))
        if "loss" not in logs or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The writer stays open: the finished model's evaluation follows."""
        self.flush()

    def flush(self) -> None:
        """Write what is held."""
        self._flushed = time.monotonic()
        for wall, step, values in self._held:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self.tb_writer._get_file_writer().add_summary(summary, step, wall)
        self._held = []
        self.tb_writer.flush()


def write_board(writer: SummaryWriter, config: Config, plan: Plan) -> None:
    """Layout, config and explanations; what is there of an earlier attempt is written over."""
    devices = max(plan.world_size, len(plan.device_uuids) * plan.nodes)
    writer.add_custom_scalars(layout(plan.world_size, devices))
    writer.add_text("config", fenced(config))
    formula = plan.mfu_formula or "unknown on this device"
    writer.add_text("figures", FORMULAS.format(formula=formula))
    # Not add_hparams: it opens a second event file in a folder of its own, which shows as another run.
    for summary in hparams(flat(config), {}):
        writer._get_file_writer().add_summary(summary)


def layout(ranks: int, devices: int) -> dict[str, Any]:
    """The custom scalars page: every chart holds all ranks, or all GPUs."""
    return {
        "Ranks": {name: multiline(tags, ranks) for name, tags in RANK_CHARTS.items()},
        "GPUs": {name: multiline(tags, devices) for name, tags in GPU_CHARTS.items()},
        "Step": {"seconds of a step": multiline(STEP, 1)},
    }


def multiline(tags: Sequence[str], count: int) -> list[Any]:
    """A chart of tags, with the numbers 0 to `count` - 1 where they have a place for one."""
    names = [tag.format(number) for tag in tags for number in (range(count) if "{}" in tag else (0,))]
    return ["Multiline", [f"train/{name}" for name in names]]


def fenced(config: Config) -> str:
    """The config as a code block."""
    text = redacted(json.dumps(config.model_dump(mode="json"), indent=2))
    return "\n".join(f"    {line}" for line in text.splitlines())


def flat(config: Config) -> dict[str, bool | float | str]:
    """Every key with a single value by its dotted name, without secrets; keys that are not set are left out."""
    return dict(_flat(config.model_dump(mode="json"), ""))


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, bool | float | str]]:
    found: list[tuple[str, bool | float | str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float):
            found.append((f"{prefix}{key}", value))
        elif isinstance(value, str):
            found.append((f"{prefix}{key}", redacted(value)))
    return found
