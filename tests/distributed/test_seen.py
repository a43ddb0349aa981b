"""What two ranks show of a run: losses, tokens and times per rank add up to the totals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from tests.contract.test_metrics_schema import undocumented_of
from tests.distributed.runs import CASES, Outcome, run_case
from tests.faults.hooks import hooked
from tests.tiny import Workplace

PARTS = ("data_seconds", "compute_seconds", "wait_seconds", "optimizer_seconds", "other_seconds")


SEEN = {
    "TRAIN_BATCH_SIZE": "2",
    "TRAIN_GRAD_ACCUM": "2",
    "TRAIN_LOGGING_STEPS": "2",
    "RUN_REPORT_TO": "tensorboard",
}


@pytest.fixture(scope="module")
def seen(shared: Workplace) -> Outcome:
    """Two gloo ranks with rows of unequal length, logged every second step, two micro-batches a step."""
    done = run_case(shared, "lora", CASES["ddp"], "seen", **SEEN)
    assert done.code == 0, done.out[-2000:] + done.err
    return Outcome(shared.path / "runs" / "seen")


def test_the_weighted_mean_of_the_losses_per_rank_is_the_loss(seen: Outcome) -> None:
    for step in seen.steps:
        shares = [step[f"loss_share_rank_{rank}"] for rank in (0, 1)]
        losses = [step[f"loss_rank_{rank}"] for rank in (0, 1)]
        assert sum(shares) == pytest.approx(1)
        weighted = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        assert weighted == pytest.approx(step["loss"], rel=1e-5)
        assert losses[0] != pytest.approx(losses[1], rel=1e-6)
    assert any(step["loss_share_rank_0"] != pytest.approx(0.5, abs=1e-3) for step in seen.steps)


def test_tokens_a_second_times_seconds_are_the_tokens(seen: Outcome) -> None:
    tokens, seconds, before = 0.0, 0.0, 0
    for step in seen.steps:
        interval = step["step"] - before
        before = step["step"]
        counted = sum(step[f"tokens_rank_{rank}"] for rank in (0, 1))
        tokens += counted
        seconds += step["step_seconds"] * interval
        assert tokens == step["num_tokens"]
        assert step["tokens_per_second"] * step["step_seconds"] * interval == pytest.approx(counted, rel=0.01)
    summary = seen.record["summary"]
    assert summary["tokens"] == tokens
    assert summary["step_seconds"] * before == pytest.approx(seconds, rel=1e-3)
    assert seen.record["tokens_per_second"] * summary["train_seconds"] == pytest.approx(tokens, rel=0.01)


def test_the_parts_of_a_step_add_up_to_it(seen: Outcome) -> None:
    for values in (*seen.steps, seen.record["summary"]):
        assert sum(values[part] for part in PARTS) == pytest.approx(values["step_seconds"], rel=1e-4, abs=1e-5)
        assert all(values[part] >= 0 for part in PARTS)
        assert values["compute_seconds"] > 0


def test_every_key_is_documented(seen: Outcome) -> None:
    assert undocumented_of(seen.path) == set()


def test_what_is_no_figure_has_its_lines(seen: Outcome) -> None:
    (start,) = seen.events("start")
    assert start["devices"] == seen.record["device_names"] == ["rank 0: CPU (node 0)", "rank 1: CPU (node 0)"]
    assert (start["step"], start["attempt"], start["resumed"], start["world_size"]) == (0, 1, False, 2)
    phases = {line["phase"]: line["bytes"] for line in seen.events("phase_memory")}
    assert set(phases) == {"load", "train"}
    assert set(phases["train"]) == {"gpu_0", "gpu_1"}
    assert all(1e8 < peak < 1e10 for peak in phases["train"].values())


def test_tensorboard_has_every_figure_and_one_chart_for_all_ranks(seen: Outcome) -> None:
    board = EventAccumulator(str(seen.path / "tb"))
    board.Reload()
    for key in set(seen.steps[-1]) - {"time", "event", "step"}:
        values = [(point.step, point.value) for point in board.Scalars(f"train/{key}")]
        assert values[: len(seen.steps)] == [
            (step["step"], pytest.approx(step[key], rel=1e-6)) for step in seen.steps
        ], key
    tensors = board.Tags()["tensors"]
    assert {"config/text_summary", "figures/text_summary", "custom_scalars__config__"} <= set(tensors)
    layout = Layout.FromString(board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["loss"] == ["train/loss", "train/loss_rank_0", "train/loss_rank_1"]
    assert "train/memory_predicted_gib" in charts["memory on the device (GiB), and predicted"]
    assert "train/power_watts_gpu_1" in charts["power (W)"]
    assert board.summary_metadata.keys() >= {"_hparams_/session_start_info"}


NVML = """
from dataclasses import replace
from tests.runtime.test_sensors import BIG, SMALL, Watched

def patch(module):
    init = module.WatchCallback.__init__
    def with_gpus(self, config, plan, *rest):
        init(self, config, replace(plan, device_uuids=(BIG["uuid"], SMALL["uuid"])), *rest)
    module.WatchCallback.__init__ = with_gpus
    nvml = Watched(dict(BIG), dict(SMALL))
    module.Sensors.__init__.__kwdefaults__.update(nvml=nvml, every=0.02)
    ended = module.WatchCallback.on_step_end
    def on_step_end(self, args, state, control, **rest):
        nvml.cards[1]["gone"] = state.global_step >= 10
        ended(self, args, state, control, **rest)
    module.WatchCallback.on_step_end = on_step_end
"""


def test_a_gpu_whose_sensors_fail_is_marked_and_the_run_goes_on(shared: Workplace, tmp_path: Path) -> None:
    hook = hooked(tmp_path / "hook", "sft_play.runtime.watching", NVML)
    done = run_case(shared, "lora", CASES["ddp"], "failing", **{**SEEN, **hook, "TRAIN_LOGGING_STEPS": "1"})
    assert done.code == 0, done.out[-2000:] + done.err
    run = Outcome(shared.path / "runs" / "failing")
    assert run.record["outcome"] == "done"
    (event,) = [one for one in run.events("event") if one["kind"] == "sensor"]
    assert event["text"].startswith("rank 1: CPU (node 0): its sensors do not answer any more")
    assert done.out.count(event["text"]) == 1
    first, last = run.steps[0], run.steps[-1]
    assert (first["power_watts_gpu_0"], first["power_watts_gpu_1"]) == (390.0, 150.0)
    assert (last["power_watts_gpu_0"], last["memory_device_gib_gpu_0"]) == (390.0, 40.0)
    assert not [key for key in last if key.endswith("_gpu_1")]
    assert undocumented_of(run.path) == set()
    board = EventAccumulator(str(run.path / "tb"))
    board.Reload()
    kept = [len(board.Scalars(f"train/temperature_celsius_gpu_{gpu}")) for gpu in (0, 1)]
    assert kept[0] == len(run.steps) > kept[1] > 0
