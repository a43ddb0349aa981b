"""Trackers beside TensorBoard: transformers' own callbacks, told where to write, a name, and no secret."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import MLflowCallback, TrackioCallback, WandbCallback

from sft_play.config.schema import Config
from sft_play.config.secrets import redacted
from sft_play.record.run_dir import RunDir

PROJECT = "sft-play"


class StandIn:
    """Another object with some of its attributes replaced; the object itself stays as it is."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The original's: wandb watches nothing but modules."""
        return type(self._original)


class WithoutSecrets(TrainerCallback):
    """What a tracker keeps of the arguments and of the model's and the adapter's configs, without secrets."""

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **named: Any) -> None:
        """Called once, by the tracker's own callback, before anything is sent."""
        told = StandIn(args, to_dict=lambda: cleaned(args.to_dict()), run_name=cleaned(args.run_name))
        super().setup(told, state, described(model), **named)


class Wandb(WithoutSecrets, WandbCallback):
    """wandb's."""


class Trackio(WithoutSecrets, TrackioCallback):
    """trackio's."""


class MLflow(WithoutSecrets, MLflowCallback):
    """mlflow's."""


CALLBACKS: dict[str, type[TrainerCallback]] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


def described(model: Any) -> StandIn:
    """A stand-in for a model, whose configs are plain values without secrets."""
    replaced: dict[str, Any] = {}
    if getattr(model, "config", None) is not None:
        kept = model.config
        replaced["config"] = StandIn(kept, to_dict=lambda: cleaned(kept.to_dict()))
    if getattr(model, "peft_config", None) is not None:
        replaced["peft_config"] = {name: cleaned(one.to_dict()) for name, one in model.peft_config.items()}
    return StandIn(model, **replaced)


def cleaned(value: Any) -> Any:
    """A value as plain JSON ones, with every text in it redacted; sets are sorted."""
    if isinstance(value, Enum):
        return cleaned(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {redacted(str(key)): cleaned(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(redacted(str(one)) for one in value)
    if isinstance(value, list | tuple):
        return [cleaned(one) for one in value]
    return redacted(str(value))


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
        "WANDB_DISABLE_GIT": "true",  # a remote's URL may hold a token
        "WANDB_RUN_ID": kept.read_text(),
        "WANDB_RESUME": "allow",
    }


def _mlflow(run: RunDir, first_step: int) -> dict[str, str]:
    store = f"sqlite:///{run.path.parent.resolve() / 'mlflow.db'}"
    return {"MLFLOW_EXPERIMENT_NAME": PROJECT, "MLFLOW_TRACKING_URI": store}
