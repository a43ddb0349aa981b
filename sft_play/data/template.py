"""The tokenizer as text sees it: tokenizer.json, its special tokens and its chat template, without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sft_play.data.builtin import BUILT_IN, built_in_source, is_name, read_built_in
from sft_play.data.sandbox import ChatTemplate, TemplateRefused
from sft_play.errors import DataError, ModelError

__all__ = ["ChatTemplate", "TemplateRefused", "TextTokenizer", "load_text_tokenizer", "read_template_source"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer with its special tokens and its template.

    Attributes:
        specials: named special tokens, such as `eos_token`, as text.
        template: None where the folder has none and the config names none.
        eos_id: None where the tokenizer names no end-of-sequence token.
        bos_id: id to put before plain text where the tokenizer's own processor does not.
    """

    tokenizer: Tokenizer
    specials: Mapping[str, str]
    template: ChatTemplate | None
    eos_id: int | None
    bos_id: int | None
    folder: Path

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The added tokens that are not blank, longest first: text that a template can close a turn with."""
        added = {str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values()}
        return tuple(sorted((text for text in added if text.strip()), key=lambda text: (-len(text), text)))

    @cached_property
    def marker(self) -> re.Pattern[str]:
        """Matches one of the markers."""
        return re.compile("|".join(map(re.escape, self.markers)) or "(?!)")

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """Ids of the added tokens: text is split at them before anything else."""
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    def need_template(self) -> ChatTemplate:
        """The template.

        Raises:
            DataError: there is none; the choices are named.
        """
        if self.template is None:
            raise DataError(
                "the tokenizer has no chat template, and chat rows need one",
                where=str(self.folder),
                fix=f"set model.chat_template to one of {', '.join(BUILT_IN)} or to a jinja file, use the instruct"
                " version of the model, or give rows of prompt and completion or of text",
            )
        return self.template


def load_text_tokenizer(folder: Path, chat_template: str | None = None) -> TextTokenizer:
    """Read a model folder's tokenizer.

    Args:
        folder: holds tokenizer.json, and beside it tokenizer_config.json and chat_template.jinja where they exist.
        chat_template: `model.chat_template`: a built-in name or a jinja file, in place of the folder's own template.

    Raises:
        ModelError: tokenizer.json is missing or damaged.
        DataError: the template is missing or not valid, or a built-in one writes tokens that the tokenizer lacks.
    """
    config = _read_config(folder)
    tokenizer = _read_tokenizer(folder)
    specials = _specials(config)
    _add_missing_tokens(tokenizer, config, specials)
    eos, bos = specials.get("eos_token"), specials.get("bos_token")
    found = read_template_source(folder, chat_template)
    if found is not None and chat_template is not None and is_name(chat_template):
        adds_bos = bool(config.get("add_bos_token")) or _puts_first(tokenizer, bos)
        found = built_in_source(chat_template, tokenizer, specials, adds_bos=adds_bos), found[1]
    template = None if found is None else ChatTemplate(found[0], specials, found[1])
    return TextTokenizer(
        tokenizer=tokenizer,
        specials=specials,
        template=template,
        eos_id=None if eos is None else tokenizer.token_to_id(eos),
        bos_id=tokenizer.token_to_id(bos) if bos is not None and config.get("add_bos_token") else None,
        folder=folder,
    )


def read_template_source(folder: Path, chat_template: str | None) -> tuple[str, str] | None:
    """The template's text and the file it comes from: the config's, else the folder's; None where neither is.

    Raises:
        DataError: `model.chat_template` names neither a built-in template nor a file.
    """
    if chat_template is not None and is_name(chat_template):
        return read_built_in(chat_template), f"model.chat_template: {chat_template}"
    if chat_template is not None:
        return _template_from_file(Path(chat_template).expanduser())
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        return _read_text(file), str(file)
    source = _read_config(folder).get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    return (source, str(folder / "tokenizer_config.json")) if isinstance(source, str) else None


def _template_from_file(file: Path) -> tuple[str, str]:
    if not file.is_file():
        fix = f"name a jinja file or one of {', '.join(BUILT_IN)}, or drop the key to use the tokenizer's own template"
        raise DataError(f"there is no file {file}", where="model.chat_template", fix=fix)
    return _read_text(file), str(file)


def _puts_first(tokenizer: Tokenizer, bos: str | None) -> bool:
    """Whether the tokenizer itself puts BOS before a text."""
    return bos is not None and tokenizer.encode("text").ids[:1] == [tokenizer.token_to_id(bos)]


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(file), fix="save the template as UTF-8 text") from error


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        fix = "use a model with a fast tokenizer, or save one there with transformers' save_pretrained"
        raise ModelError("tokenizer.json is missing", where=str(folder), fix=fix)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"not a tokenizer: {error}", where=str(file), fix="download the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_config(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"not JSON: {error}", where=str(file), fix="download the model again") from error
        if isinstance(values, dict):
            merged |= {key: value for key, value in values.items() if value is not None}
    return merged


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: config[name] for name in _NAMED_TOKENS if name in config}
    return {name: str(value["content"] if isinstance(value, dict) else value) for name, value in named.items()}


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], specials: Mapping[str, str]) -> None:
    """Older folders name added tokens in their config only; they get the ids that transformers gives them."""
    listed = config.get("added_tokens_decoder", {})
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(token["content"]) is None:
            flags = {k: token[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in token}
            tokenizer.add_tokens([AddedToken(token["content"], **flags)])
    # Also a token of the base vocabulary has to be declared, else its text is split like any other.
    added = {str(token.content) for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([text for text in dict.fromkeys(specials.values()) if text not in added])
