"""The pure core stays pure and quick to import."""

from __future__ import annotations

import subprocess
import sys

CODE = (
    "import sys, sft_play.plan.strategy, sft_play.facts.probe, sft_play.facts.model;"
    "print(sorted({'torch', 'transformers', 'numpy', 'accelerate', 'datasets'} & set(sys.modules)))"
)


def test_facts_and_plan_load_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
