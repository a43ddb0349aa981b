"""TASKS of `make eval`: lm-evaluation-harness over the same model, with tasks of its own or of local YAML files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sft_play.errors import EnvironmentProblem, UsageError

INSTALL = ".venv/bin/pip install -c constraints.txt -c constraints-eval.txt lm-eval"


def require_package() -> None:
    """TASKS need a package that is not installed by default.

    Raises:
        EnvironmentProblem: it is missing.
    """
    if find_spec("lm_eval") is None:
        raise EnvironmentProblem("lm-eval is not installed", where="TASKS", fix=INSTALL)


def evaluate_tasks(target: Any, tasks: str, options: argparse.Namespace, batch: int) -> dict[str, dict[str, float]]:
    """Figures by column (`base`, `tuned` or `model`), each `<task>/<metric>`.

    Args:
        tasks: names, YAML files and folders of them, with commas between.

    Raises:
        UsageError: a task is not there.
    """
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from peft import PeftModel

    from sft_play.runtime.standalone import load_base, load_target, without_adapter

    wanted, folders = split_tasks(tasks)
    manager = TaskManager(include_path=[str(folder) for folder in folders])
    names = [one for name in wanted for one in _known(manager, name)]
    model, tokenizer = load_target(target)

    def measured(one: Any) -> dict[str, float]:
        plain = one.get_base_model() if isinstance(one, PeftModel) else one  # adapters stay in its layers
        harness = HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=batch)
        return _figures(_run(harness, names, manager, options))

    found: dict[str, dict[str, float]] = {}
    if options.compare:
        if target.base is None:
            with without_adapter(model):
                found["base"] = measured(model)
        else:
            found["base"] = measured(load_base(target))
    found["tuned" if target.adapter or target.base else "model"] = measured(model)
    return found


def split_tasks(tasks: str) -> tuple[list[str], list[Path]]:
    """Task names, and the folders to look for them in: a YAML file gives its `task:`, a folder all of its files'.

    Raises:
        UsageError: a path that is not there, or without tasks.
    """
    names: list[str] = []
    folders: list[Path] = []
    for word in filter(None, (one.strip() for one in tasks.split(","))):
        path = Path(word)
        if "/" not in word and path.suffix not in (".yaml", ".yml") and not path.is_dir():
            names.append(word)
            continue
        files = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
        here = [name for file in files if (name := _task_of(file))]
        if not here:
            raise UsageError(f"no task in {word}", where="TASKS", fix="name a task, its YAML file or a folder of them")
        names += here
        folders.append(path if path.is_dir() else path.parent)
    if not names:
        raise UsageError("names no task", where="TASKS", fix="TASKS=hellaswag,my_tasks/")
    return names, folders


def _task_of(file: Path) -> str | None:
    """The `task:` line of a YAML file; the files of tasks hold tags that only lm-eval can read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        fix = "name a task, its YAML file or a folder of them"
        raise UsageError(f"{file} cannot be read ({error.strerror})", where="TASKS", fix=fix) from error
    found = [line.partition(":")[2].strip().strip("'\"") for line in lines if line.startswith("task:")]
    return found[0] if found and found[0] else None


def _known(manager: Any, name: str) -> list[str]:
    matched: list[str] = manager.match_tasks([name])
    if not matched:
        raise UsageError(f"no task {name!r}", where="TASKS", fix="lm-eval ls tasks lists them; a folder adds your own")
    return matched


def _run(harness: Any, names: list[str], manager: Any, options: argparse.Namespace) -> Mapping[str, Any]:
    from lm_eval import simple_evaluate

    found: Mapping[str, Any] = simple_evaluate(
        model=harness,
        tasks=names,
        task_manager=manager,
        num_fewshot=options.shots,
        limit=options.max_rows,
        apply_chat_template=options.chat,
        bootstrap_iters=0,
        log_samples=False,
    )
    return found


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    """`<task>/<metric>` of every figure; filters other than none are named behind it."""
    figures = {}
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and "," in key:
                figures[f"{task}/{metric}{'' if chosen == 'none' else f' ({chosen})'}"] = float(value)
    return figures
