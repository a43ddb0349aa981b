"""A resolved config as YAML again: what was set, with its origin beside it, fit to be given as CONFIG."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from sft_play.config.keys import KEYS
from sft_play.config.origin import Resolved
from sft_play.config.values import plain


def render_config(resolved: Resolved) -> str:
    """The settings that are no defaults, as a YAML file that resolves to the same config.

    Defaults are left out because writing one is a statement of its own: an adapter's rank beside
    `tuning.mode: full` is refused, whatever its value.
    """
    root = CommentedMap()
    for key in KEYS.values():
        if not resolved.explicit(key.name):
            continue
        branch = root
        for section in key.section.split("."):
            branch = branch.setdefault(section, CommentedMap())
        branch[key.leaf] = plain(resolved.value(key.name))
        branch.yaml_add_eol_comment(f"from {resolved.origins[key.name].where}", key.leaf, column=40)
    return _to_text(root)


def _to_text(root: Any) -> str:
    yaml = YAML()
    yaml.width = 1 << 20
    yaml.default_flow_style = False
    stream = io.StringIO()
    yaml.dump(root, stream)
    return stream.getvalue()
