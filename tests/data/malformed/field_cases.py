"""Sharegpt rows and rows of plain fields: missing, of a wrong type, of several formats in one file."""

from __future__ import annotations

from tests.data.malformed.made import GOOD, PAIR, USER, Case, case, chat, lines, pair, row, spoken, turns

_KNOWN = "known are system, developer, user, assistant, tool, function"
_SPEAKERS = (
    "known are system, developer, human, user, gpt, assistant, chatgpt, bing, bard, model, function_call, tool, function, "
    "observation, function_response, tool_response"
)
_SYSTEM = {"role": "system", "content": "s"}


def _bad(said: str, content: bytes, complaint: str) -> Case:
    return case(said, "r.jsonl", content, f"r.jsonl:1: {complaint}")


SHAREGPT: list[Case] = [
    case("no turn at all", "r.jsonl", row(conversations=[]), chat()),
    _bad("an unknown speaker", spoken(("alien", "x")), f"conversations[0].from: unknown role 'alien'; {_SPEAKERS}"),
    _bad("nothing said", b'{"conversations": [{"from": "human"}]}', "conversations[0].value: missing; found from"),
    _bad("null said", spoken(("human", None)), "conversations[0].value: text expected, found null"),
    _bad(
        "a list said",
        spoken(("human", ["x", 1])),
        "conversations[0].value[0]: an object with type and text expected, found text",
    ),
    _bad(
        "a call that is none",
        spoken(("human", "x"), ("function_call", "f(1)")),
        'conversations[1].value: a call as JSON expected: {"name": ..., "arguments": {...}}',
    ),
    _bad(
        "a call of null",
        spoken(("human", "x"), ("function_call", "null")),
        "conversations[1].value: a call as an object expected, found null",
    ),
    _bad(
        "an observation first",
        spoken(("observation", "x")),
        "conversations[0]: a tool's result before any assistant turn",
    ),
    _bad(
        "system in the middle",
        spoken(("human", "x"), ("system", "s")),
        "conversations[1]: a system message after the first turn",
    ),
    case(
        "both writings in one file",
        "r.jsonl",
        lines(spoken(("human", "x")), row(conversations=[USER])),
        chat(("user", "x")),
        "r.jsonl:2: conversations[0].from: missing; found role, content, as in the format messages: role, content",
    ),
    case(
        "both writings in one row",
        "r.jsonl",
        row(conversations=[USER, {"from": "gpt", "value": "y"}]),
        "r.jsonl:1: conversations[1].role: missing; found from, value, as in the format sharegpt: from, value",
    ),
]

FIELDS: list[Case] = [
    _bad("null", b'{"prompt": null, "completion": "b"}', "prompt: text expected, found null"),
    _bad(
        "null everywhere",
        b'{"prompt": null, "completion": null}',
        "prompt: text expected, found null",
    ),
    _bad("a list", b'{"prompt": ["x"], "completion": "b"}', "prompt: text expected, found a list"),
    _bad("a number", b'{"prompt": 3, "completion": "b"}', "prompt: text expected, found a number"),
    _bad("true", b'{"prompt": "a", "completion": true}', "completion: text expected, found true or false"),
    _bad("an object", b'{"prompt": "a", "completion": {}}', "completion: text expected, found an object"),
    _bad(
        "turns and a text",
        row(prompt=[USER], completion="b"),
        "completion: a list of messages expected, as its counterpart is one; found text",
    ),
    _bad(
        "turns and a bad turn",
        row(prompt=[USER], completion=[{"role": "x"}]),
        f"completion[0].role: unknown role 'x'; {_KNOWN}",
    ),
    _bad(
        "system in the completion",
        row(prompt=[USER], completion=[_SYSTEM]),
        "prompt + completion[1]: a system message after the first turn",
    ),
    case(
        "brackets that are text",
        "r.jsonl",
        row(prompt="[{1}]", completion="b"),
        pair("[{1}]", "b"),
    ),
    _bad("input a number", b'{"instruction": "i", "input": 4, "output": "o"}', "input: text expected, found a number"),
    _bad("output a list", b'{"instruction": "i", "output": ["o"]}', "output: text expected, found a list"),
    _bad("target a number", b'{"input": "i", "target": 1}', "target: text expected, found a number"),
    _bad("system a list", b'{"system": [], "user": "u", "assistant": "a"}', "system: text expected, found a list"),
    _bad("text a list", b'{"text": ["a"]}', "text: text expected, found a list"),
    _bad(
        "a wrong letter",
        b'{"promt": "a", "completion": "b"}',
        "no known format has the fields promt, completion; name them in data.columns",
    ),
    _bad("no field", b"{}", "no known format has the fields none; name them in data.columns"),
    _bad(
        "fields of 15 names",
        row(**{f"f{n}": 1 for n in range(15)}),
        f"no known format has the fields {', '.join(f'f{n}' for n in range(12))}, 3 more; name them in data.columns",
    ),
    _bad(
        "a name with line ends", row(**{"a\nb": 1}), "no known format has the fields 'a\\nb'; name them in data.columns"
    ),
    _bad(
        "a name of half a letter",
        row(**{"\ud800": 1}),
        "no known format has the fields '\\ud800'; name them in data.columns",
    ),
    _bad(
        "question and answer",
        row(question="q", answer="a"),
        "no known format has the fields question, answer; name them: data.columns: {prompt: question, completion: answer}",
    ),
    _bad(
        "a preference",
        row(prompt="q", chosen="a", rejected="b"),
        "no known format has the fields prompt, chosen, rejected; name them: data.columns: {completion: chosen}, if the chosen answers are what is to be learned",
    ),
    case(
        "text among pairs",
        "r.jsonl",
        lines(GOOD, row(text="a"), GOOD, turns(USER)),
        PAIR,
        "r.jsonl:2: prompt: missing; found text; the row looks like text in a file of prompt_completion: put it into a file of its own",
        PAIR,
        "r.jsonl:4: prompt: missing; found messages; the row looks like messages in a file of prompt_completion: put it into a file of its own",
    ),
    case(
        "alpaca among turns",
        "r.jsonl",
        lines(turns(USER), row(instruction="i", output="o")),
        chat(("user", "x")),
        "r.jsonl:2: messages: missing; the row has instruction, output; the row looks like alpaca in a file of messages: put it into a file of its own",
    ),
    case(
        "a field missing",
        "r.jsonl",
        lines(GOOD, b"", b'{"prompt": "a"}'),
        PAIR,
        "r.jsonl:3: completion: missing; found prompt",
    ),
    case(
        "the first row of no format",
        "r.jsonl",
        lines(row(id=1), GOOD),
        "r.jsonl:1: no known format has the fields id; name them in data.columns",
        PAIR,
    ),
]
