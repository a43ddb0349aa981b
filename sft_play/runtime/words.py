"""The words that ROUGE counts: rouge-score's own, of a-z and 0-9, or those of every script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from unicodedata import category, normalize

# Letters of scripts that put no space between words: Thai, Lao, Myanmar, Khmer, kana, Han.
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
FIX = "train.eval_rouge_tokenizer: unicode counts words of every script"


class UnicodeWords:
    """A tokenizer for rouge-score: runs of letters, their marks and digits, in small letters and NFKC.

    Each letter of a script without spaces is a word. Of ASCII text the words are those of rouge-score.
    """

    def tokenize(self, text: str) -> list[str]:
        words: list[str] = []
        joins = ""  # kinds of characters that go on with the last word
        for char in normalize("NFKC", text).lower():
            kind = category(char)[0]
            alone = kind != "M" and _SPACELESS.match(char) is not None
            if kind not in "LMN":
                joins = ""
            elif kind in joins and not alone:
                words[-1] += char
            else:
                words.append(char)
                joins = "M" if alone else "LMN"
        return words


def unseen_note(references: Iterable[str], tokenizer: str) -> str:
    """Of how many references ROUGE counts less than half of the letters and digits; empty where of none.

    Args:
        tokenizer: `rouge_score` or `unicode`, which sees all of them.
    """
    if tokenizer == "unicode":
        return ""
    listed = list(references)
    unseen = sum(map(_mostly_unseen, listed))
    if not unseen:
        return ""
    return f"ROUGE counts a-z and 0-9 only: less than half of the letters of {unseen:,} of {len(listed):,} references"


def _mostly_unseen(text: str) -> bool:
    letters = [char for char in text.lower() if char.isalnum()]
    return 2 * sum(char.isascii() for char in letters) < len(letters)
