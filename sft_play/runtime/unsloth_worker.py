"""The worker of `tuning.backend: unsloth`: unsloth is imported before the stack that it patches, then all is the same.

Started with the interpreter of unsloth's own environment.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    if sys.platform == "linux":  # importing takes most of a minute; a parent that dies meanwhile ends it
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    import_module("unsloth")  # first of all: it patches what the rest imports

    from sft_play.runtime.worker import main

    sys.exit(main(Path(sys.argv[1])))
