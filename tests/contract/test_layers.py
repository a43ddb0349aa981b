"""The import rules that keep the layers apart and the fast commands fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import ROOT, assert_answers_in

LAYERS = ("errors", "config", "facts", "plan", "record", "launch", "data", "report", "runtime", "cli")
HEAVY = {"torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "datasets"}
FILES = sorted((ROOT / "sft_play").rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


def layer(file: Path) -> str:
    parts = file.relative_to(ROOT / "sft_play").parts
    return parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_layer_imports_one_to_its_right(file: Path) -> None:
    own = layer(file)
    if own in ("__init__", "__main__"):
        return
    for name in imports(file):
        if not name.startswith("sft_play."):
            continue
        other = name.split(".")[1]
        assert LAYERS.index(other) <= LAYERS.index(own), f"{own} imports {name}"
        assert (own, other) != ("runtime", "launch"), f"runtime imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_runtime_imports_the_heavy_stack(file: Path) -> None:
    if layer(file) == "runtime":
        return
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = {id(child) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            heavy = name.split(".")[0] in HEAVY
            deferred = layer(file) == "cli" and id(node) in inside
            assert not heavy or deferred, f"imports {name}"
            if layer(file) == "cli" and name.startswith(("sft_play.runtime", "sft_play.data.prepare")):
                assert id(node) in inside, f"{name} is imported before the config is resolved"


@pytest.mark.parametrize("words", [["config"], ["config", "--json"]])
def test_fast_commands_load_no_torch_and_answer_in_half_a_second(words: list[str]) -> None:
    code = (
        "import sys; from sft_play.cli.app import run; code = run(sys.argv[1:]);"
        f"loaded = {sorted(HEAVY | {'numpy'})!r};"
        "print(*[name for name in loaded if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    environ = {"PATH": "/usr/bin:/bin", "CONFIG": "configs/demo.yaml"}

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
        )
        assert done.stderr.strip() == ""

    assert_answers_in(0.5, run)


def test_a_config_error_answers_in_half_a_second() -> None:
    environ = {"PATH": "/usr/bin:/bin", "CONFIG": "configs/demo.yaml", "TRAIN_BATCH_SIZE": "many"}

    def run() -> None:
        done = subprocess.run([sys.executable, "-m", "sft_play", "train"], cwd=ROOT, env=environ, capture_output=True)
        assert done.returncode == 2
        assert b"TRAIN_BATCH_SIZE" in done.stderr

    assert_answers_in(0.5, run)
