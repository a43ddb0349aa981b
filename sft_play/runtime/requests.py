"""What a request to the endpoint may hold: transformers' server takes most of it on trust and then fails within."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Fields that would have something else computed than what was trained, or without a bound.
REFUSED = ("generation_config", "logit_bias")


def request_problem(body: Mapping[str, Any]) -> str:
    """The first thing in a request that cannot be answered; empty where all can."""
    given = {name: value for name, value in body.items() if value is not None}
    if refused := [name for name in REFUSED if name in given]:
        return f"{refused[0]} is not offered"
    for name in LENGTHS:
        if name in given and not (_is_whole(given[name]) and given[name] > 0):
            return f"{name} has to be a whole number from 1 on"
    if not _is_number(given.get("temperature", 0)) or given.get("temperature", 0) < 0:
        return "temperature has to be a number from 0 on"
    if not _is_number(given.get("top_p", 1)) or not 0 < given.get("top_p", 1) <= 1:
        return "top_p has to be above 0 and at most 1"
    if not _is_whole(given.get("seed", 0)):
        return "seed has to be a whole number"
    stop = given.get("stop", "")
    if not isinstance(stop, str) and not _all_text(stop):
        return "stop has to be a string or a list of them"
    return messages_problem(given["messages"]) if "messages" in given else ""


def messages_problem(messages: Any) -> str:
    """What is wrong with a chat; empty where nothing is."""
    if not isinstance(messages, list) or not messages:
        return "messages has to be a list with at least one message"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{number}] has no role"
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                return f"messages[{number}] holds something that is no text"
            if any("\ud800" <= letter <= "\udfff" for letter in part["text"]):
                return f"messages[{number}] holds half of a character (a lone surrogate)"
    return ""


def _all_text(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, str) for value in values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
