"""The tokenizer as text sees it: tokenizer.json, its special tokens and its chat template, without transformers.

Chat templates are programs that come with a model, so they run in jinja2's immutable sandbox and see plain
values only. The environment offers what transformers offers, so that both render the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer

from sft_play.errors import DataError, ModelError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE_FILE = "chat_template.jinja"


class TemplateRefused(Exception):
    """The template itself refused these messages with raise_exception; its words are the message."""


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """`{% generation %}...{% endgeneration %}`: a mark for trainers, rendered as what stands between."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: names set inside stay inside, as they do in transformers.
        return jinja2.nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Any) -> Any:
        return caller()


class _Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
    """jinja2's namespace without names that start with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **names: Any) -> None:
        for name in dict(*args[1:], **names):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _plain_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _raise_exception(message: object) -> None:
    raise TemplateRefused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_plain_dict, namespace=_Namespace
    )
    return environment


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja2 text.
        specials: `bos_token` and the like, visible in the template by these names.
        where: the file it comes from, for messages.

    Raises:
        DataError: the text is not a template.
    """

    def __init__(self, source: str, specials: Mapping[str, str], where: str) -> None:
        self.source = source
        self.where = where
        self._specials = dict(specials)
        try:
            self._compiled = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(
                f"the chat template is not valid jinja: {error}", where=where, fix="mend it, or set model.chat_template"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = False) -> str:
        """The messages as text.

        Raises:
            TemplateRefused: the template raised on purpose (a role or an order that it does not take).
            DataError: it failed, or tried to leave its sandbox.
        """
        try:
            text: str = self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._specials,
            )
            return text
        except TemplateRefused:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise DataError(
                f"the chat template tried to leave its sandbox: {error}",
                where=self.where,
                fix="do not use this model's template; set model.chat_template to one you trust",
            ) from error
        except Exception as error:
            # A template is a program: any error of it is a fault of the template, told in one line.
            raise DataError(
                f"the chat template failed: {type(error).__name__}: {error}",
                where=self.where,
                fix="mend it, or set model.chat_template to another file",
            ) from error


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

    def need_template(self) -> ChatTemplate:
        """The template.

        Raises:
            DataError: there is none; the choices are named.
        """
        if self.template is None:
            raise DataError(
                "the tokenizer has no chat template, and chat rows need one",
                where=str(self.folder),
                fix="set model.chat_template to a jinja file, use the instruct version of the model,"
                " or give rows of prompt and completion or of text",
            )
        return self.template


def load_text_tokenizer(folder: Path, chat_template: str | None = None) -> TextTokenizer:
    """Read a model folder's tokenizer.

    Args:
        folder: holds tokenizer.json, and beside it tokenizer_config.json and chat_template.jinja where they exist.
        chat_template: `model.chat_template`: a jinja file that replaces the folder's own template.

    Raises:
        ModelError: tokenizer.json is missing or damaged.
        DataError: the template is missing or not valid.
    """
    config = _read_config(folder)
    tokenizer = _read_tokenizer(folder)
    specials = _specials(config)
    _add_missing_tokens(tokenizer, config, specials)
    found = read_template_source(folder, chat_template)
    template = None if found is None else ChatTemplate(found[0], specials, found[1])
    eos, bos = specials.get("eos_token"), specials.get("bos_token")
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
        DataError: `model.chat_template` names no file.
    """
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
        fix = f"name a jinja file, or drop the key to use the tokenizer's own template; no {file} is here"
        raise DataError(
            "built-in templates are not available yet, and no such file", where="model.chat_template", fix=fix
        )
    return _read_text(file), str(file)


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
