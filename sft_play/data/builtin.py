"""Chat templates that come with this program, by name: `model.chat_template: chatml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from sft_play.errors import DataError

_FOLDER = Path(__file__).parent / "templates"
_NEEDED_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "alpaca": (),
    "plain": (),
}
_CLOSED_BY_EOS = ("mistral", "alpaca", "plain")
BUILT_IN = tuple(_NEEDED_TOKENS)
"""Names of the built-in templates."""


def is_name(chat_template: str) -> bool:
    """Whether a value of `model.chat_template` is a name: one plain word. A slash or an ending makes it a file."""
    return "/" not in chat_template and "." not in chat_template


def read_built_in(name: str) -> str:
    """The text of a built-in template.

    Raises:
        DataError: there is none of this name; the names are listed.
    """
    if name not in _NEEDED_TOKENS:
        fix = f"use one of {', '.join(BUILT_IN)}, or the path of a jinja file"
        raise DataError(f"no built-in template {name!r}, and no such file", where="model.chat_template", fix=fix)
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def built_in_source(name: str, tokenizer: Tokenizer, specials: Mapping[str, str], *, adds_bos: bool) -> str:
    """A built-in template as it fits a tokenizer: it writes BOS where the tokenizer puts it before plain text.

    Raises:
        DataError: the tokenizer lacks special tokens that the template writes, or the name is unknown.
    """
    source = read_built_in(name)
    added = {str(token.content) for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in _NEEDED_TOKENS[name] if token not in added]
    if name in _CLOSED_BY_EOS and "eos_token" not in specials:
        missing.append("an eos_token")
    if missing:
        raise DataError(
            f"the tokenizer lacks special tokens that the template {name} writes: {', '.join(missing)}",
            where="model.chat_template",
            fix="use alpaca or plain, which need none but eos_token, or a template made for this tokenizer",
        )
    return "{{- bos_token }}\n" + source if adds_bos and "bos_token" in specials else source
