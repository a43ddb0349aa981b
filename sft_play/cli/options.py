"""Options of a command: argparse, with its errors as one line like all others."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from sft_play.errors import UsageError


class Options(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raises: UsageError."""
        raise UsageError(message, where="ARGS", fix=f"{self.prog} ARGS=--help lists the options")


def share(text: str) -> float:
    """A number above 0, for `type=`."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def temperature(text: str) -> float:
    """A number from 0 on, for `type=`."""
    return 0.0 if _number(text) == 0 else share(text)


def positive(text: str) -> int:
    """A whole number from 1 on, for `type=`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
