"""`make download`: fetch a model once, so that planning and training need no network."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.cli.inputs import config_path
from sft_play.cli.options import Options
from sft_play.cli.run_start import say
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.config.resolve import resolve
from sft_play.errors import DiskFullError, Interrupted, ModelError, ModelUnreachableError, SftPlayError, UsageError
from sft_play.facts.download import RemoteModel, fetch_large, look_up
from sft_play.facts.locate import ModelFolder, check_model_folder, locate_model

GIB = 2**30
# Left free beside the model, for the small files of the cache and whatever else writes.
SPARE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be fetched, and the input that named it."""

    name: str
    revision: str | None
    code: bool
    where: str


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Fetch the model that MODEL, or the config CONFIG, names.

    Raises:
        UsageError: neither is given, or both.
        ModelError, ModelUnreachableError: there is no such model, or one may not read it, or it cannot be trained.
        DiskFullError: it would not fit; said before the first byte.
        Interrupted: Ctrl-C; what is there stays, and the same command goes on.
    """
    parser = Options(prog="make download", description=__doc__)
    parser.add_argument("--revision", help="branch, tag or commit, with MODEL=")
    parser.add_argument("--code", action="store_true", help="the model's Python files too (model.trust_remote_code)")
    options = parser.parse_args(list(argv))
    wanted = wanted_model(environ, options.revision, code=options.code)
    if Path(wanted.name).expanduser().is_dir():
        say(f"{wanted.name} is a folder; nothing is fetched")
        check_model_folder(Path(wanted.name).expanduser(), wanted.name)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = fetch(wanted)
    except KeyboardInterrupt:
        raise Interrupted(f"{wanted.name} is not whole yet; what was fetched stays", where="download") from None
    except SftPlayError as error:
        if error.where == "model.name":
            error.where = wanted.where
        raise
    commit = found.path.name
    say(f"{wanted.name} is here: {found.weight_bytes / GIB:.2f} GiB of weights in {found.path}")
    say(f"to stay with it: model.revision: {commit}")
    return 0


def wanted_model(environ: Mapping[str, str], revision: str | None, *, code: bool) -> Wanted:
    """The model of MODEL or of CONFIG.

    Raises:
        UsageError: neither is given, or both, or no hub id.
    """
    model, config = environ.get("MODEL"), environ.get("CONFIG")
    if bool(model) == bool(config):
        fix = "make download MODEL=owner/name, or CONFIG=configs/mine.yaml"
        raise UsageError("name either MODEL or CONFIG", fix=fix)
    if model:
        check_inputs(environ, INPUTS_OF["download"])
        return Wanted(name=model, revision=revision, code=code, where="MODEL")
    if revision:
        raise UsageError("--revision belongs to MODEL=", where="ARGS", fix="MODEL_REVISION=... sets the config's")
    section = resolve(config_path(environ), environ, inputs=INPUTS_OF["download"]).config.model
    trusted = code or section.trust_remote_code
    return Wanted(name=section.name, revision=section.revision, code=trusted, where="model.name")


def fetch(wanted: Wanted) -> ModelFolder:
    """Look it up, check that it fits, fetch what is missing, check that it is whole."""
    try:
        model = look_up(wanted.name, wanted.revision, trust_remote_code=wanted.code)
    except ModelUnreachableError as error:
        return on_this_disk(wanted, error)
    check_trainable(model)
    describe(model)
    check_room(model)
    fetch_large(model, say)
    return locate_model(wanted.name, wanted.revision, trust_remote_code=wanted.code)


def on_this_disk(wanted: Wanted, error: SftPlayError) -> ModelFolder:
    """The model as an earlier download left it, where the hub cannot be asked.

    Raises:
        SftPlayError: `error`, where it is not whole.
    """
    try:
        found = locate_model(wanted.name, wanted.revision, trust_remote_code=wanted.code)
    except SftPlayError:
        raise error from None
    print(f"warning: {error.what}; taken from this disk as it is", file=sys.stderr)
    return found


def check_trainable(model: RemoteModel) -> None:
    """Refuse a repository without safetensors before anything is fetched.

    Raises:
        ModelError: it has pickled or converted weights only.
    """
    if not any(file.name.endswith(".safetensors") for file in model.files):
        what = f"{model.name} has no safetensors weights"
        raise ModelError(what, where=model.name, fix="name the repository that has them; pickled ones are never loaded")


def describe(model: RemoteModel) -> None:
    """Say what it is before it is fetched: files, sizes, licence, commit."""
    licence = f"licence {model.licence}" if model.licence else "no licence named"
    accepted = ", accepted by your account" if model.gated else ""
    say(f"{model.name} at {model.commit}: {licence}{accepted}")
    weights = sum(file.size_bytes for file in model.files if file.name.endswith(".safetensors"))
    here = model.size_bytes - model.missing_bytes
    say(f"{len(model.files)} files, {model.size_bytes / GIB:.2f} GiB, of which weights {weights / GIB:.2f} GiB")
    say(f"{here / GIB:.2f} GiB are here, {model.missing_bytes / GIB:.2f} GiB to fetch into {model.cache}")


def check_room(model: RemoteModel) -> None:
    """Refuse what does not fit.

    Raises:
        DiskFullError: with the bytes needed and free.
    """
    place = next(folder for folder in (model.cache, *model.cache.parents) if folder.is_dir())
    free, needed = shutil.disk_usage(place).free, model.missing_bytes
    if needed and needed + SPARE_BYTES > free:
        what = f"{needed / GIB:.1f} GiB are still to come and {free / GIB:.1f} GiB are free"
        raise DiskFullError(what, where=str(place), fix="free space, or point HF_HOME to another disk")
