"""Credentials have no place in a config, which a run's folder keeps a copy of, nor in anything that is said or kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
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

# A shorter value is no secret, and taking it out would tear words apart.
SHORTEST_SECRET = 6
_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_NO_SECRET = re.compile(r"_(PATH|FILE|DIR|URL|MAX_NEW_TOKENS)$", re.IGNORECASE)
_IN_URL = re.compile(r"://([^/\s@]+)@")


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with `***` for the values of secret variables and for credentials in URLs: the stack's messages may
    quote what they were given.

    Args:
        environ: the environment to protect; by default this process's own.
    """
    for secret in _secrets(os.environ if environ is None else environ):
        text = text.replace(secret, "***")
    return _IN_URL.sub("://***@", text) if "://" in text else text


def _secrets(environ: Mapping[str, str]) -> Iterable[str]:
    named = [value for name, value in environ.items() if _SECRET_NAME.search(name) and not _NO_SECRET.search(name)]
    in_urls = [found[1].partition(":")[2] for value in environ.values() for found in _IN_URL.finditer(value)]
    found = {one for one in (*named, *in_urls) if len(one) >= SHORTEST_SECRET}
    in_json = {json.dumps(one)[1:-1] for one in found}  # quotes, backslashes and accents are written otherwise there
    return sorted(found | in_json, key=len, reverse=True)


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
