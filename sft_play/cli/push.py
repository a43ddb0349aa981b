"""`make push`: upload a run's result to the hub, private by default, after showing what would go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.inputs import run_folder
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.config.secrets import redacted
from sft_play.errors import DataError, EnvironmentProblem, ModelError, UsageError
from sft_play.record.manifest import NAME, folder_problem
from sft_play.record.results import is_merged_from
from sft_play.report.card import base_of, model_card
from sft_play.report.read import RunFacts, read_object, read_run

FORM = "make push RUN=runs/NAME REPO=user/name"
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADAPTER_SETTINGS = "adapter_config.json"
BASE_PATH = "base_model_name_or_path"


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What is sent.

    Attributes:
        files: name in the repository -> a file, or the text in its place.
    """

    repo: str
    private: bool
    files: dict[str, Path | bytes]

    def size_bytes(self, name: str) -> int:
        """Of one file."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Push the result of RUN to REPO.

    Raises:
        UsageError: REPO is no repository, or nobody is there to say yes.
        ModelError: there is no result, or it is damaged.
        DataError: what the run kept of itself is damaged.
        EnvironmentProblem: no token, or the hub refuses.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["push"])
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    run, repo = environ.get("RUN") or "", environ.get("REPO") or ""
    if not run or not REPO.fullmatch(repo):
        what = f"{repo!r} is no repository" if repo else "RUN and REPO are needed"
        raise UsageError(what, where="REPO" if repo else "", fix=FORM)
    facts = read_run(run_folder(run, "RUN", environ))
    if facts.damaged:
        fix = "the card is made from it: put back what the run wrote, or move the file away"
        raise DataError(f"a file is damaged: {facts.damaged[0]}", where=str(facts.path), fix=fix)
    folder = chosen_folder(facts, options)
    if problem := folder_problem(folder):
        raise ModelError(f"the result is not whole: {problem}", where=str(folder), fix="make merge or make train again")
    token = need_token()
    upload = Upload(repo=repo, private=not options.public, files=files_of(folder, facts))
    show(upload, folder)
    if not (options.yes or agreed()):
        print("nothing was sent")
        return 0
    with hub_said(repo):
        print(f"pushed: {send(upload, token)}", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make push", description=__doc__)
    result.add_argument("--public", action="store_true", help="everybody may read it; private unless given")
    result.add_argument("--yes", action="store_true", help="do not ask")
    which = result.add_mutually_exclusive_group()
    which.add_argument("--adapter", action="store_true", help="the adapter, where there is a merged model too")
    which.add_argument("--merged", action="store_true", help="the merged model")
    return result


def chosen_folder(facts: RunFacts, options: argparse.Namespace) -> Path:
    """`adapter/` or `model/` of a run; asks for a word where both are there.

    Raises:
        UsageError: both are there and none is chosen.
        ModelError: the one that is chosen is not there, or was merged from an earlier adapter.
    """
    adapter, model = facts.path / "adapter", facts.path / "model"
    if options.adapter or options.merged:
        folder = adapter if options.adapter else model
    elif adapter.is_dir() and model.is_dir():
        raise UsageError(
            "the run has an adapter and a merged model", where="ARGS", fix="--adapter or --merged says which"
        )
    else:
        folder = adapter if adapter.is_dir() else model
    if not folder.is_dir():
        fix = "make merge writes it" if options.merged else "finish the run with make train"
        raise ModelError(f"there is no {folder.name} to push", where=str(facts.path), fix=fix)
    if folder == model and adapter.is_dir() and not is_merged_from(model, adapter / "adapter_model.safetensors"):
        what = "the merged model is of another adapter than the run's"
        raise ModelError(what, where=str(model), fix=f"make merge RUN={facts.path}")
    return folder


def need_token() -> str:
    """The token of HF_TOKEN or of the hub's login.

    Raises:
        EnvironmentProblem: there is none.
    """
    from huggingface_hub import get_token

    token: str | None = get_token()
    if not token:
        fix = "set HF_TOKEN in the environment, or log in with .venv/bin/hf auth login"
        raise EnvironmentProblem("there is no token for the hub", where="HF_TOKEN", fix=fix)
    return token


def files_of(folder: Path, facts: RunFacts) -> dict[str, Path | bytes]:
    """The files of a result, without what names places of this machine: the manifest stays here."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME)
    files: dict[str, Path | bytes] = {str(path.relative_to(folder)): path for path in paths}
    if "README.md" not in files:
        kind = "adapter" if ADAPTER_SETTINGS in files else "model"
        files["README.md"] = model_card(facts, kind=kind).encode()
    if ADAPTER_SETTINGS in files:
        settings = read_object(folder / ADAPTER_SETTINGS)
        settings[BASE_PATH] = base_of(facts) or Path(str(settings.get(BASE_PATH))).name
        files[ADAPTER_SETTINGS] = (json.dumps(settings, indent=2) + "\n").encode()
    return dict(sorted(files.items()))


def show(upload: Upload, folder: Path) -> None:
    """What would be sent, and where to."""
    sizes = {name: upload.size_bytes(name) for name in upload.files}
    print(f"{folder} -> {upload.repo}, {'private' if upload.private else 'PUBLIC: everybody can read it'}")
    for name, size in sizes.items():
        print(f"  {size:>15,}  {name}")
    print(f"  {sum(sizes.values()):>15,}  bytes in {len(sizes)} files", flush=True)


def agreed() -> bool:
    """Whether the user types yes.

    Raises:
        UsageError: nobody is there to ask.
    """
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", where="ARGS", fix="--yes sends without asking")
    return input("send it? [yes/no] ").strip().lower() in ("y", "yes")


def send(upload: Upload, token: str) -> str:
    """Create the repository where it is not there, and upload everything as one commit; returns its address.

    Raises:
        UsageError: the repository is there and public, and --public is not given.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(token=token)
    try:
        public = api.model_info(upload.repo).private is False
    except RepositoryNotFoundError:
        api.create_repo(upload.repo, private=upload.private, repo_type="model")
        public = not upload.private
    if public and upload.private:
        fix = "--public says that this is meant, or choose another REPO"
        raise UsageError("the repository is there and public", where=f"REPO={upload.repo}", fix=fix)
    changes: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in upload.files.items()
    ]
    return str(api.create_commit(upload.repo, changes, commit_message="Upload from sft-play").repo_url)


@contextlib.contextmanager
def hub_said(repo: str) -> Iterator[None]:
    """The hub's refusals as one line, without the token.

    Raises:
        EnvironmentProblem: the hub refused, or could not be reached.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise EnvironmentProblem("the hub is switched off", where="HF_HUB_OFFLINE", fix="unset it") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        refused = status in (401, 403)
        fix = "the token needs the right to write there" if refused else "try again; what was sent is kept"
        what = f"the hub answered {status}: {redacted(str(error).splitlines()[0])[:200]}"
        raise EnvironmentProblem(what, where=repo, fix=fix) from error
    except (HTTPError, OSError, ValueError) as error:  # the last where what answers is no hub
        what = f"the hub cannot be reached ({redacted(str(error))[:200]})"
        raise EnvironmentProblem(what, where=repo, fix="check the network and HF_ENDPOINT") from error
