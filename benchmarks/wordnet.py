"""WordNet as chat rows: 117,659 real questions and answers from Debian's `wordnet-base`, for tests of scale.

    python -m benchmarks.wordnet rows.jsonl [--limit 1000]

One synset a row: its first word is asked for, its gloss is the answer. The file format is that of `man wndb`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

FOLDER = Path("/usr/share/wordnet")
KINDS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
ROWS = 117_659


def read_synsets(folder: Path = FOLDER) -> Iterator[tuple[str, str, str]]:
    """(word, kind, gloss) of every synset, in file order.

    Raises:
        FileNotFoundError: WordNet is not installed (`apt install wordnet-base`).
    """
    for suffix, kind in KINDS.items():
        for line in (folder / f"data.{suffix}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            yield fields.split()[4].split("(")[0].replace("_", " "), kind, gloss.strip()


def chat_row(word: str, kind: str, gloss: str) -> dict[str, list[dict[str, str]]]:
    """A question and its answer as messages."""
    question = {"role": "user", "content": f"What does the {kind} {word!r} mean?"}
    return {"messages": [question, {"role": "assistant", "content": gloss}]}


def write_rows(file: Path, limit: int | None = None) -> int:
    """Write the rows as JSONL; returns their number."""
    count = 0
    with file.open("w", encoding="utf-8") as stream:
        for synset in islice(read_synsets(), limit):
            stream.write(json.dumps(chat_row(*synset), ensure_ascii=False) + "\n")
            count += 1
    return count


def main() -> int:
    """Write the file and say how many rows it holds."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("file", type=Path)
    options.add_argument("--limit", type=int)
    chosen = options.parse_args()
    try:
        print(f"{write_rows(chosen.file, chosen.limit):,} rows")
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is not there: apt install wordnet-base")
    return 0


if __name__ == "__main__":
    sys.exit(main())
