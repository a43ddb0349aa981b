"""Encodings, and JSON that is cut off, doubled, nested or wrong."""

from __future__ import annotations

from tests.data.malformed.made import GOOD, PAIR, Case, case, lines, pair, row

_TWO = '{"prompt": "ä", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n'
_LIST = b'[\n{"prompt": "a", "completion": "b"}'
_HUGE = "x" * 10_000_000

ENCODINGS: list[Case] = [
    case(
        "latin-1", "r.jsonl", _TWO.encode("latin-1"), "r.jsonl:1: not UTF-8: byte 0xe4 at position 13", pair("c", "d")
    ),
    case(
        "UTF-16, little end first", "r.jsonl", _TWO.encode("utf-16"), "r.jsonl: the file is UTF-16 -> save it as UTF-8"
    ),
    case(
        "UTF-16, big end first",
        "r.jsonl",
        b"\xfe\xff" + _TWO.encode("utf-16-be"),
        "r.jsonl: the file is UTF-16 -> save it as UTF-8",
    ),
    case("UTF-16 unmarked", "r.jsonl", _TWO.encode("utf-16-le"), "r.jsonl: the file is UTF-16 -> save it as UTF-8"),
    case(
        "UTF-16 unmarked, other end",
        "r.csv",
        "a,b\n".encode("utf-16-be"),
        "r.csv: the file is UTF-16 -> save it as UTF-8",
    ),
    case("UTF-32", "r.json", "[]".encode("utf-32"), "r.json: the file is UTF-32 -> save it as UTF-8"),
    case(
        "bad bytes in the middle",
        "r.jsonl",
        lines(GOOD, b'{"prompt": "\xff", "completion": "b"}', GOOD),
        PAIR,
        "r.jsonl:2: not UTF-8: byte 0xff at position 13",
        PAIR,
    ),
    case("a letter cut in half", "r.jsonl", b'{"prompt": "\xe2\x82', "r.jsonl:1: not UTF-8: byte 0xe2 at position 13"),
    case("a mark at the start", "r.jsonl", b"\xef\xbb\xbf" + GOOD, PAIR),
    case("a mark before a list", "r.json", b"\xef\xbb\xbf[" + GOOD + b"]", PAIR),
    case("a mark before a header", "r.csv", b"\xef\xbb\xbfprompt,completion\na,b\n", PAIR),
    case(
        "a mark in the middle",
        "r.jsonl",
        lines(GOOD, b"\xef\xbb\xbf" + GOOD),
        PAIR,
        "r.jsonl:2: not JSON: expecting value at column 1",
    ),
    case("Windows line ends", "r.jsonl", GOOD + b"\r\n\r\n" + GOOD + b"\r\n", PAIR, PAIR),
    case(
        "old Mac line ends",
        "r.jsonl",
        GOOD + b"\r" + GOOD + b"\r",
        "r.jsonl:1: not JSON: extra data at column 36",
    ),
    case(
        "a NUL byte in a text",
        "r.jsonl",
        lines(b'{"prompt": "a\x00", "completion": "b"}', GOOD),
        "r.jsonl:1: not JSON: invalid control character at column 14",
        PAIR,
    ),
    case("an escaped NUL", "r.jsonl", b'{"prompt": "\\u0000", "completion": "b"}', pair("\0", "b")),
    case("NUL bytes only", "r.jsonl", bytes(64), "r.jsonl:1: not JSON: expecting value at column 1"),
    case(
        "half of a letter",
        "r.jsonl",
        b'{"prompt": "a\\ud800", "completion": "b"}',
        "r.jsonl:1: prompt: not UTF-8 text at character 2",
    ),
    case("both halves of a letter", "r.jsonl", b'{"prompt": "\\ud83d\\ude00", "completion": "b"}', pair("😀", "b")),
    case(
        "a tab as it is", "r.jsonl", b'{"prompt": "\t"}', "r.jsonl:1: not JSON: invalid control character at column 13"
    ),
]

JSON: list[Case] = [
    case("an empty file", "r.jsonl", b""),
    case("blank lines only", "r.jsonl", b"\n \n\t\r\n"),
    case("an empty list", "r.json", b" [ ] "),
    case("an empty .json", "r.json", b"\n"),
    case(
        "a cut off last line",
        "r.jsonl",
        GOOD + b'\n{"prompt": "a", "comple',
        PAIR,
        "r.jsonl:2: the last line is cut off",
    ),
    case("no line end at the end", "r.jsonl", GOOD + b"\n" + GOOD, PAIR, PAIR),
    case(
        "a comma missing",
        "r.jsonl",
        b'{"prompt": "a" "completion": "b"}\n',
        "r.jsonl:1: not JSON: expecting ',' delimiter at column 16",
    ),
    case("text after a row", "r.jsonl", GOOD + b" x", "r.jsonl:1: not JSON: extra data at column 36"),
    case("two rows in a line", "r.jsonl", GOOD + GOOD, "r.jsonl:1: not JSON: extra data at column 35"),
    case(
        "single quotes",
        "r.jsonl",
        b"{'prompt': 'a'}",
        "r.jsonl:1: not JSON: expecting property name enclosed in double quotes at column 2",
    ),
    case("a comment", "r.jsonl", b"// rows\n" + GOOD, "r.jsonl:1: not JSON: expecting value at column 1", PAIR),
    case("a list as a row", "r.jsonl", b"[1, 2]\n", "r.jsonl:1: an object with fields expected, found a list"),
    case("null as a row", "r.jsonl", b"null\n", "r.jsonl:1: an object with fields expected, found null"),
    case("a text as a row", "r.jsonl", b'"a"\n', "r.jsonl:1: an object with fields expected, found text"),
    case("NaN as a row", "r.jsonl", b"NaN\n", "r.jsonl:1: NaN is not JSON"),
    case("NaN in a row", "r.jsonl", b'{"prompt": "a", "completion": "b", "score": NaN}', "r.jsonl:1: NaN is not JSON"),
    case("-Infinity", "r.jsonl", b'{"prompt": -Infinity}', "r.jsonl:1: -Infinity is not JSON"),
    case("a number too large for a float", "r.jsonl", b'{"prompt": "a", "completion": "b", "n": 1e999}', PAIR),
    case(
        "a field twice",
        "r.jsonl",
        b'{"prompt": "a", "prompt": "c", "completion": "b"}',
        "r.jsonl:1: the field prompt stands twice in one object",
    ),
    case(
        "a field twice, deep down",
        "r.jsonl",
        b'{"messages": [{"role": "user", "content": "x", "content" : "y"}]}',
        "r.jsonl:1: the field content stands twice in one object",
    ),
    case(
        "a field twice, written differently",
        "r.jsonl",
        b'{"prompt": "a", "\\u0070rompt": "c", "completion": "b"}',
        "r.jsonl:1: the field prompt stands twice in one object",
    ),
    case("nested without end", "r.jsonl", b"[" * 100_000, "r.jsonl:1: nested too deeply"),
    case("nested deeply in a field", "r.jsonl", b'{"a": ' * 5000 + b"1" + b"}" * 5000, "r.jsonl:1: nested too deeply"),
    case(
        "nested, and not used",
        "r.jsonl",
        b'{"prompt": "a", "completion": "b", "x": ' + b"[" * 100 + b"]" * 100 + b"}",
        PAIR,
    ),
    case(
        "a number of 10,000 digits",
        "r.jsonl",
        lines(b'{"prompt": ' + b"9" * 10_000 + b"}", GOOD),
        "r.jsonl:1: a number has too many digits",
        PAIR,
    ),
    case("a line of 10 MB", "r.jsonl", row(prompt="a", completion=_HUGE), pair("a", _HUGE)),
    case(
        "a bad line of 10 MB",
        "r.jsonl",
        row(prompt=[_HUGE]),
        "r.jsonl:1: no known format has the fields prompt; name them in data.columns",
    ),
    case(
        "a list in a .jsonl",
        "r.jsonl",
        b"[\n" + GOOD + b"\n]\n",
        "r.jsonl: the file is a JSON list, not one row a line -> name it .json, or write one row a line",
    ),
    case("rows in a .json", "r.json", GOOD + b"\n" + GOOD, PAIR, PAIR),
    case(
        "an object around the rows",
        "r.json",
        b'{\n"data": []}',
        "r.json: the file is neither a JSON list of rows nor one row a line"
        " -> write the rows as a list [{...}, {...}], or one a line in a .jsonl file",
    ),
    case(
        "one row over several lines",
        "r.json",
        b'{"prompt": "a",\n"completion": "b"}',
        "r.json: the file is neither a JSON list of rows nor one row a line"
        " -> write the rows as a list [{...}, {...}], or one a line in a .jsonl file",
    ),
    case("a list cut off at once", "r.json", b"[", "r.json:1: the list is cut off"),
    case("a list cut off", "r.json", _LIST + b",\n", PAIR, "r.json:3: the list is cut off"),
    case("a list without its end", "r.json", _LIST + b"\n", PAIR, "r.json:3: the list is cut off"),
    case("a comma at the end", "r.json", _LIST + b",]", PAIR, "r.json:2: not JSON: expecting value at column 36"),
    case(
        "no comma between rows",
        "r.json",
        _LIST + b"\n" + GOOD,
        PAIR,
        "r.json:3: not JSON: expecting ',' delimiter at column 1",
    ),
    case("text after the list", "r.json", _LIST + b"\n]\nx", PAIR, "r.json:3: text after the list"),
    case(
        "numbers in the list",
        "r.json",
        _LIST + b",\n\n1]",
        PAIR,
        "r.json:4: an object with fields expected, found a number",
    ),
    case("lists in the list", "r.json", b"[[" + GOOD + b"]]", "r.json:1: an object with fields expected, found a list"),
    case("bad bytes in a list", "r.json", b'[\n{"prompt": "\xff"}]', "r.json:2: not UTF-8: byte 0xff at position 13"),
    case("NaN in a list", "r.json", b'[{"prompt": NaN}]', "r.json:1: NaN is not JSON"),
    case("a list nested without end", "r.json", b"[" * 100_000, "r.json:1: nested too deeply"),
]
