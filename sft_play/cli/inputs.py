"""What several commands read from their environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from sft_play.config.schema import Config, RunSection
from sft_play.errors import UsageError
from sft_play.facts.model import read_model_facts
from sft_play.facts.shapes import ModelFacts
from sft_play.record.run_dir import RunDir
from sft_play.report.read import read_kept
from sft_play.report.state import is_run


def config_path(environ: Mapping[str, str]) -> Path:
    """The file that CONFIG names.

    Raises:
        UsageError: CONFIG is not given.
    """
    name = environ.get("CONFIG")
    if not name:
        raise UsageError("CONFIG is missing", fix="name a file, such as CONFIG=configs/demo.yaml")
    return Path(name)


def planning_facts(config: Config) -> ModelFacts:
    """Facts of the config's model from its folder, the hub's cache or the catalog, in that order.

    Raises:
        ModelError: it is in none of them.
    """
    return read_model_facts(config.model.name)


def run_folder(name: str, where: str, environ: Mapping[str, str]) -> Path:
    """The folder of a run: a path, or the name of one in the output folder.

    Args:
        where: the input that names it.

    Raises:
        UsageError: there is no run.
    """
    for folder in (Path(name), output_dir(environ) / name):
        if is_run(folder):
            return folder
    what = f"{name} is no run of sft-play" if Path(name).exists() else f"there is no run {name}"
    raise UsageError(what, where=where, fix="make runs lists them")


def warn_of_damage(folder: Path) -> None:
    """Say on stderr what is left out of what a run shows."""
    for line in read_kept(RunDir(folder))[1]:
        print(f"warning: left out, as the file is damaged: {folder}/{line}", file=sys.stderr)


def run_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that RUNS names, each once however it is spelt.

    Raises:
        UsageError: RUNS cannot be split into words, or names what is no run.
    """
    try:
        names = shlex.split(environ.get("RUNS", ""))
    except ValueError as error:
        raise UsageError(f"cannot be split into words ({error})", where="RUNS", fix="close the quote") from error
    folders = [run_folder(name, "RUNS", environ) for name in names]
    return list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]


def output_dir(environ: Mapping[str, str]) -> Path:
    """The folder that holds all runs, for the commands without a config."""
    return Path(environ.get("RUN_OUTPUT_DIR") or RunSection().output_dir)


def tensorboard_port(environ: Mapping[str, str]) -> int:
    """The first port to try, for the commands without a config.

    Raises:
        UsageError: RUN_TENSORBOARD_PORT is no port.
    """
    text = environ.get("RUN_TENSORBOARD_PORT") or str(RunSection().tensorboard_port)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise UsageError(f"{text!r} is no port", where="RUN_TENSORBOARD_PORT", fix="a number from 1 to 65535")
    return int(text)
