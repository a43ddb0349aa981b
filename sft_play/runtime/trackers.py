"""Trackers beside TensorBoard: transformers' own callbacks, told where to write and what the run is called."""

from __future__ import annotations

import os
import uuid

from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TrackioCallback, WandbCallback

from sft_play.config.schema import Config
from sft_play.record.run_dir import RunDir

PROJECT = "sft-play"
CALLBACKS = {"wandb": WandbCallback, "mlflow": MLflowCallback, "trackio": TrackioCallback}


def callbacks_of_trackers(config: Config, run: RunDir, first_step: int) -> list[TrainerCallback]:
    """One callback a tracker of `run.report_to`. What the environment says of them goes before what is set here.

    Args:
        first_step: the first step that this attempt will train: beyond 1 it goes on with the same curve in wandb.
    """
    trackers = [one for one in config.run.report_to if one in CALLBACKS]
    settings = {"wandb": _wandb, "mlflow": _mlflow}
    for tracker in settings.keys() & set(trackers):
        for name, value in settings[tracker](run, first_step).items():
            os.environ.setdefault(name, value)
    return [CALLBACKS[one]() for one in trackers]


def _wandb(run: RunDir, first_step: int) -> dict[str, str]:
    kept = run.launch / "wandb-id"
    if first_step == 1 or not kept.is_file():
        kept.write_text(uuid.uuid4().hex)
    return {
        "WANDB_PROJECT": PROJECT,
        "WANDB_DIR": str(run.path),
        "WANDB_CONSOLE": "off",  # run.log has it
        "WANDB_RUN_ID": kept.read_text(),
        "WANDB_RESUME": "allow",
    }


def _mlflow(run: RunDir, first_step: int) -> dict[str, str]:
    store = f"sqlite:///{run.path.parent.resolve() / 'mlflow.db'}"
    return {"MLFLOW_EXPERIMENT_NAME": PROJECT, "MLFLOW_TRACKING_URI": store}
