"""Credentials have no place in a config: a run's folder keeps a copy of it."""

from __future__ import annotations

import re
from typing import Any

from sft_play.config.origin import Setting
from sft_play.errors import ConfigError

_TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(
        hf_[A-Za-z0-9]{16,} | sk-(proj-|ant-|or-|svcacct-)?[A-Za-z0-9_]{16,} | gh[pousr]_[A-Za-z0-9]{20,}
        | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,} | xox[abpr]-[A-Za-z0-9-]{10,} | AKIA[0-9A-Z]{16}
    ) | ://[^/\s:@]+:[^/\s@]+@""",
    re.VERBOSE,
)


def looks_secret(value: Any) -> bool:
    """Whether a value, or anything in it, has the form of a token or of a URL with a password."""
    if isinstance(value, str):
        return _TOKEN.search(value) is not None
    if isinstance(value, dict):
        return any(looks_secret(one) for pair in value.items() for one in pair)
    return isinstance(value, list | tuple) and any(looks_secret(one) for one in value)


def secret_error(setting: Setting) -> ConfigError:
    """The error for a setting that looks like a credential. The value itself is never repeated."""
    where = setting.error_place.partition("=")[0]
    what = f"{setting.key} looks like a token or a URL with a password"
    return ConfigError(what, where=where, fix="secrets belong in the environment, such as HF_TOKEN")
