"""`make train-distributed-tb`: `make train-distributed` with TensorBoard beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sft_play.cli import train


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """See `train.main`."""
    return train.main(argv, environ, name="train-distributed-tb")
