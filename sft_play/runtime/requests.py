"""What a request to the endpoint may hold: transformers' server takes much on trust, or leaves it out in silence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.data.bad_row import RowProblem, shown_names, type_name
from sft_play.data.fields import check_nested
from sft_play.data.mask import as_turns
from sft_play.data.tools import read_tools
from sft_play.data.turns import read_turns

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Fields that are answered, beside the one that is needed.
READ = {
    *LENGTHS,
    "chat_template_kwargs",
    "instructions",
    "model",
    "seed",
    "stop",
    "stream",
    "temperature",
    "tools",
    "top_p",
}
# Fields that change no answer. The last part of a stream always has the usage.
HARMLESS = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "stream_options", "user",
}  # fmt: skip
# All others are refused, since transformers' server would leave them out in silence or compute something that was not
# trained; here are the values of them that ask for nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "suffix": ("",),
    "text": (
        {},
        {"verbosity": "medium"},
        {"format": {"type": "text"}},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
# Beyond them the likelihoods of float32 are no numbers any more.
TEMPERATURES = (1e-9, 1e9)
# What torch takes.
SEEDS = (-(2**63), 2**64 - 1)
# Items of the input of `/v1/responses` that are no messages, and the fields that each needs.
ITEMS = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
# Fields of items that are read, or that say nothing to a model.
ITEM_FIELDS = {
    "arguments", "call_id", "content", "encrypted_content", "id", "name", "output", "phase", "role", "status",
    "summary", "type",
}  # fmt: skip


def request_problem(body: dict[str, Any], needed: str) -> str:
    """The first thing in a request that cannot be answered; empty where all can.

    Args:
        body: loses the fields that ask for nothing.
        needed: the field that has to be there.
    """
    for name in [name for name, value in body.items() if value is None or _asks_for_nothing(name, value)]:
        del body[name]
    if not body.get("tools") and body.get("tool_choice") == "none":
        del body["tool_choice"]
    if refused := sorted(set(body) - READ - HARMLESS - {needed}):
        instead = f"; leave it out, or {refused[0]}={NOTHING[refused[0]][0]!r}" if refused[0] in NOTHING else ""
        return f"{refused[0]} is not offered{instead}"
    if needed not in body:
        return f"{needed} is missing"
    return problem_of_numbers(body) or problem_of_texts(body) or problem_of_tools(body.get("tools"))


def problem_of_numbers(body: Mapping[str, Any]) -> str:
    """The first number that nothing can be computed with; empty where there is none."""
    for name in LENGTHS:
        if name in body and not (_is_whole(body[name]) and body[name] > 0):
            return f"{name} has to be a whole number from 1 on"
    least, most = TEMPERATURES
    heat = body.get("temperature", 0)
    if not _is_number(heat) or not (heat == 0 or least <= heat <= most):
        return f"temperature has to be 0, or from {least:g} to {most:g}"
    if not _is_number(body.get("top_p", 1)) or not 0 < body.get("top_p", 1) <= 1:
        return "top_p has to be above 0 and at most 1"
    if not _is_whole(body.get("seed", 0)) or not SEEDS[0] <= body.get("seed", 0) <= SEEDS[1]:
        return f"seed has to be a whole number from {SEEDS[0]} to {SEEDS[1]}"
    return ""


def problem_of_texts(body: Mapping[str, Any]) -> str:
    """What is wrong with `stop`, `stream` and the letters of all but a chat, which is read later."""
    stop = body.get("stop", "-")
    if not stop or not (isinstance(stop, str) or (_all_text(stop) and all(stop))):
        return "stop has to be a string or a list of them, none empty"
    if not isinstance(body.get("stream", False), bool):
        return "stream has to be true or false"
    try:
        for name, value in body.items():
            if name != "messages":
                check_nested(value, name)
    except RowProblem as problem:
        return f"{problem.field}: {problem.reason}"
    return ""


def problem_of_items(body: Mapping[str, Any]) -> str:
    """What is wrong with the items of `input`, or beside them; empty where nothing is."""
    items = body["input"]
    for number, item in enumerate(items if isinstance(items, list) else ()):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            return f"{where}: an object expected, found {type_name(item)}"
        needed = () if "role" in item else ITEMS.get(str(item.get("type")), ())
        for name in needed:
            if name not in item:
                return f"{where}.{name}: missing; found {shown_names(item)}"
        given = {name for name, value in item.items() if value}
        if "role" in item and (unread := sorted(given - ITEM_FIELDS)):
            return f"{where}: {', '.join(unread)} would be left out"
        if item.get("type") == "reasoning" and not _all_parts(item.get("content") or []):
            return f"{where}.content: a list of parts with a text expected"
    if body.get("instructions") and isinstance(items, list) and items and items[0].get("role") == "system":
        return "instructions, and input begins with a system message too: one would be left out"
    return ""


def problem_of_tools(tools: Any) -> str:
    """What is wrong with the tools of a request; empty where nothing is. They are read as those of a row are."""
    if tools is not None and not isinstance(tools, list):
        return f"tools: a list of tools expected, found {type_name(tools)}"
    try:
        read_tools(tools)
    except RowProblem as problem:
        return f"{problem.field}: {problem.reason}"
    return ""


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """A chat as a row of training is read: the same roles, the same order, the same words for the template.

    Raises:
        RowProblem: the first fault. Fields that nothing reads are one, unless they are empty.
    """
    if not isinstance(messages, list) or not messages:
        raise RowProblem("messages", "a list with at least one message expected")
    unused: set[str] = set()
    turns = read_turns({"messages": [_told(turn, "content") for turn in messages]}, "messages", unused)
    if unused:
        raise RowProblem("messages", f"{', '.join(sorted(unused))} would be left out")
    return [dict(turn) for turn in as_turns(turns)]


def _told(given: Any, text: str) -> Any:
    """A turn, or a part of one, without its empty fields, but for the one that holds its text."""
    if not isinstance(given, dict):
        return given
    told = {name: value for name, value in given.items() if value or name == text}
    if isinstance(parts := told.get(text), list):
        told[text] = [_told(part, "text") for part in parts]
    return told


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a value is one of NOTHING; no number stands for true or false."""
    if isinstance(value, dict):
        value = {key: inside for key, inside in value.items() if inside is not None}
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NOTHING.get(name, ()))


def _all_text(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, str) for value in values)


def _all_parts(parts: Any) -> bool:
    return isinstance(parts, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))
