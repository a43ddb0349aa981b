"""run.json as something to act on: config and plan of a run, whole, or an error that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_play.config.schema import Config
from sft_play.plan.build import Plan
from sft_play.record.shapes import Told, read_fitting, refuse_misfits

NEEDED = ("run", "node", "config", "plan", "stamp", "model_path", "splits", "longest_first")
PRECISIONS = ("fp32", "bf16", "fp16")
FIX = "attempts/ beside it holds a copy for each start"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a run was told.

    Attributes:
        values: all of run.json as it was read.
    """

    values: dict[str, Any]
    config: Config
    plan: Plan


def read_told(run_json: Path) -> Orders:
    """What the run whose folder holds `run_json` was told at its latest start.

    Raises:
        DataError: the file is damaged.
    """
    values, misfits = read_fitting(run_json, Told)
    refuse_misfits(run_json, misfits, FIX)
    refuse_misfits(run_json, [f"{key} is missing" for key in NEEDED if values.get(key) is None], FIX)
    try:
        config, plan = Config.model_validate(values["config"]), Plan(**values["plan"])
    except ValidationError as error:
        misfits = [f"{'.'.join(map(str, ('config', *one['loc'])))}: {one['msg']}" for one in error.errors()]
    except TypeError as error:  # a field that is missing, or that no plan has
        misfits = [f"plan: {error}"]
    else:
        misfits = list(_impossible(plan))
    refuse_misfits(run_json, misfits, FIX)
    return Orders(values=values, config=config, plan=plan)


def read_model_path(run_json: Path) -> Path:
    """The folder of the base model that a run was told.

    Raises:
        DataError: the file is damaged, or says nothing of it.
    """
    values, misfits = read_fitting(run_json, Told)
    refuse_misfits(run_json, misfits, FIX)
    refuse_misfits(run_json, [] if values.get("model_path") else ["model_path is missing"], FIX)
    return Path(values["model_path"])


def _impossible(plan: Plan) -> Iterator[str]:
    """Counts below one, and precisions that there are not."""
    for name, value in vars(plan).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield f"plan.{name} cannot be {value}"
    for name, value in (("dtype", plan.dtype), ("autocast", plan.autocast)):
        if value not in PRECISIONS:
            yield f"plan.{name} cannot be {value!r}"
