"""Faults put into the real program: code that runs in every worker once a module of it is loaded."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import ROOT

FINDER = """
import importlib.abc, importlib.util, os, sys
rank = int(os.environ.get("RANK", 0))

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patch())
"""


def hooked(folder: Path, module: str, patch: str) -> dict[str, str]:
    """Variables under which `patch` (which defines `patch(module)`, and knows `rank`) runs after `module` is loaded."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(FINDER.format(module=module) + patch)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}
