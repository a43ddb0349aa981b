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
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def temperature(text: str) -> float:
    """A number from 0 on, for `type=`."""
    return 0.0 if float(text) == 0 else share(text)


def positive(text: str) -> int:
    """A whole number from 1 on, for `type=`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
