"""Chat templates as programs: they come with a model, so they run in jinja2's immutable sandbox and see plain values.

The environment offers what transformers offers, so that both render the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from sft_play.data.bounded import BoundedEnvironment, Unbounded, check_length
from sft_play.errors import DataError

Turn = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters, which no template writes by itself.
_OPEN, _CLOSE = "\ue002", "\ue003"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


class TemplateRefused(Exception):
    """The template itself refused these messages with raise_exception; its words are the message."""


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """`{% generation %}...{% endgeneration %}`: a mark for trainers, rendered as what stands between."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(marking=False)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: names set inside stay inside, as they do in transformers.
        return jinja2.nodes.CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Any) -> Any:
        return f"{_OPEN}{caller()}{_CLOSE}" if self.environment.marking else caller()


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


def _environment(now: datetime) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=now.strftime, dict=_plain_dict, namespace=_Namespace
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
        # One moment for all its texts: a date that a template writes must not change between two of them.
        self._environment = _environment(datetime.now())
        try:
            self._compiled = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(
                f"the chat template is not valid jinja: {error}", where=where, fix="mend it, or set model.chat_template"
            ) from error
        self._names = {**self._compiled.globals, "documents": None, **specials}

    def render(self, messages: Sequence[Turn], *, tools: Tools | None = None, generation_prompt: bool = False) -> str:
        """The messages as text.

        Raises:
            TemplateRefused: the template raised on purpose (a role or an order that it does not take).
            DataError: it failed, does not come to an end, or tried to leave its sandbox.
        """
        try:
            names = {**self._names, "messages": messages, "tools": tools, "add_generation_prompt": generation_prompt}
            self._environment.steps = 0
            # What `render` of jinja2 does, less the merging of names, which takes longer than most templates do.
            text = "".join(self._compiled.root_render_func(self._compiled.new_context(names, shared=True)))
            check_length(text)
            return text
        except TemplateRefused:
            raise
        except Unbounded as error:
            raise DataError(
                f"the chat template {error}", where=self.where, fix="set model.chat_template to another one"
            ) from error
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

    def marked(self, messages: Sequence[Turn], *, tools: Tools | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The messages as text, and the character ranges between its `{% generation %}` marks.

        Raises:
            TemplateRefused, DataError: as `render` does.
        """
        self._environment.marking = True
        try:
            parts = _MARKS.split(self.render(messages, tools=tools))
        finally:
            self._environment.marking = False
        ranges, at = [], 0
        for number, part in enumerate(parts):
            if number % 2:
                ranges.append((at, at + len(part)))
            at += len(part)
        return "".join(parts), ranges

    def turns(self, messages: Sequence[Turn]) -> list[dict[str, Any]]:
        """The messages as the template is to see them, the same for training and for inference.

        A developer message is a system message to a template that has no developer. Arguments of a tool call that
        are written as JSON text are given as the object they stand for, which is what templates expect.
        """
        turns = [dict(message) for message in messages]
        for turn in turns:
            if turn["role"] == "developer" and not self._takes_developer:
                turn["role"] = "system"
            if turn.get("tool_calls"):
                turn["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
        return turns

    @cached_property
    def _takes_developer(self) -> bool:
        probe = [{"role": "developer", "content": "xdeveloperx"}, {"role": "user", "content": "question"}]
        try:
            return "xdeveloperx" in self.render(probe)
        except (TemplateRefused, DataError):
            return False


def _with_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return dict(call)
        if isinstance(parsed, dict):
            return {**call, "arguments": parsed}
    return dict(call)
