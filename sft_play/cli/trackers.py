"""What the trackers of `run.report_to` need, looked for before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentProblem

# mlflow asks for an older pandas than the pinned one.
PINS = dict.fromkeys(("wandb", "trackio"), "-c constraints.txt -c constraints-trackers.txt ")
WANDB_HOST = "https://api.wandb.ai"
WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
# Would have a callback send checkpoints from folders that the Trainer names otherwise, and fail at the first save.
WEIGHTS = {
    "wandb": ("WANDB_LOG_MODEL", ("", "false")),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", ("", "0", "false", "no", "off")),
}
WITHOUT_ACCOUNT = ("offline", "disabled", "dryrun")


def check_trackers(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse a run whose trackers cannot work; only machine 0 reports.

    Raises:
        EnvironmentProblem: a package is not installed, or a key is missing; weights are to be sent too.
    """
    if config.dist.node_rank:
        return
    for tracker in config.run.report_to:
        if find_spec(tracker) is None:
            raise EnvironmentProblem(
                f"the package {tracker} is not installed",
                where="run.report_to",
                fix=f".venv/bin/pip install {PINS.get(tracker, '')}{tracker}, or take it out of run.report_to",
            )
        name, neutral = WEIGHTS.get(tracker, ("", ()))
        if name and environ.get(name, "").lower() not in neutral:
            raise EnvironmentProblem(
                "trackers are sent figures here, no weights",
                where=f"{name}={environ[name]}",
                fix="unset it; make push sends the result to the hub",
            )
    if "wandb" in config.run.report_to and not has_wandb_key(environ):
        raise EnvironmentProblem(
            "wandb has no key",
            where="run.report_to",
            fix="set WANDB_API_KEY, or WANDB_MODE=offline to keep the figures in the run's folder",
        )
    if "trackio" in config.run.report_to and environ.get("TRACKIO_SPACE_ID") and not has_hub_token(environ):
        raise EnvironmentProblem(
            "trackio has no token for its Space",
            where="TRACKIO_SPACE_ID",
            fix="set HF_TOKEN, or unset TRACKIO_SPACE_ID to keep the figures on this machine",
        )


def has_wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb finds a key, or was told to need none."""
    if environ.get("WANDB_MODE") in WITHOUT_ACCOUNT or any(environ.get(name) for name in WANDB_KEYS):
        return True
    file = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        host = urlparse(environ.get("WANDB_BASE_URL") or WANDB_HOST).hostname or ""
        return netrc(file).authenticators(host) is not None
    except (OSError, ValueError, NetrcParseError):
        return False


def has_hub_token(environ: Mapping[str, str]) -> bool:
    """Whether the hub's client finds a token."""
    home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    file = Path(environ.get("HF_TOKEN_PATH") or home / "token")
    return bool(environ.get("HF_TOKEN")) or file.is_file()
