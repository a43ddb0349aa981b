"""What a request to the endpoint may hold: transformers' server takes much on trust, or leaves it out in silence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sft_play.data.bad_row import RowProblem, type_name
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
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


def request_problem(body: dict[str, Any], needed: str) -> str:
    """The first thing in a request that cannot be answered; empty where all can.

    Args:
        body: loses the fields that ask for nothing.
        needed: the field that has to be there.
    """
    for name in [name for name, value in body.items() if value is None or _asks_for_nothing(name, value)]:
        del body[name]
    if refused := sorted(set(body) - READ - HARMLESS - {needed}):
        instead = f"; leave it out, or {refused[0]}={NOTHING[refused[0]][0]!r}" if refused[0] in NOTHING else ""
        return f"{refused[0]} is not offered{instead}"
    if needed not in body:
        return f"{needed} is missing"
    for name in LENGTHS:
        if name in body and not (_is_whole(body[name]) and body[name] > 0):
            return f"{name} has to be a whole number from 1 on"
    if not _is_number(body.get("temperature", 0)) or body.get("temperature", 0) < 0:
        return "temperature has to be a number from 0 on"
    if not _is_number(body.get("top_p", 1)) or not 0 < body.get("top_p", 1) <= 1:
        return "top_p has to be above 0 and at most 1"
    if not _is_whole(body.get("seed", 0)):
        return "seed has to be a whole number"
    stop = body.get("stop", "-")
    if not stop or not (isinstance(stop, str) or (_all_text(stop) and all(stop))):
        return "stop has to be a string or a list of them, none empty"
    if not isinstance(body.get("stream", False), bool):
        return "stream has to be true or false"
    return problem_of_tools(body.get("tools"))


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
    told = [
        {name: value for name, value in turn.items() if value or name == "content"} if isinstance(turn, dict) else turn
        for turn in messages
    ]
    turns = read_turns({"messages": told}, "messages", unused)
    if unused:
        raise RowProblem("messages", f"{', '.join(sorted(unused))} would be left out")
    return [dict(turn) for turn in as_turns(turns)]


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a value is one of NOTHING; no number stands for true or false."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NOTHING.get(name, ()))


def _all_text(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, str) for value in values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
