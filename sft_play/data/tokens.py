"""From characters of a text to the tokens that hold them."""

from __future__ import annotations

from tokenizers import Encoding


def token_range(encoding: Encoding, text: str, start: int, end: int) -> tuple[int, int] | None:
    """Tokens (first, after the last) that hold the characters from `start` to `end`; None where no token does.

    A token that begins before `start` belongs to the range only if it holds a character of it that is not blank.
    """
    first = _token_from(encoding, start, end)
    if first is None:
        return None
    left, right = token_characters(encoding, first)
    if left < start and not text[start:right].strip():
        first += 1
    last = end - 1
    while (token := encoding.char_to_token(last)) is None and last > start:
        last -= 1
    if token is None:
        return None
    after = token + 1
    count = len(encoding)
    while after < count and start <= token_characters(encoding, after)[0] < end:
        after += 1
    return first, after


def token_characters(encoding: Encoding, token: int) -> tuple[int, int]:
    """The characters (first, after the last) that a token holds; (-1, -1) for one that stands for no text."""
    return encoding.token_to_chars(token) or (-1, -1)


def _token_from(encoding: Encoding, start: int, end: int) -> int | None:
    for position in range(start, end):
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            return token
    return None
