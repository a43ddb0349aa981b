"""Negative controls of the check at start: what the stack does in silence without our hand is caught by name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.distributed.runs import CASES, run_case
from tests.tiny import Workplace

# What is taken away from the worker, and what the check then says.
TAKEN = {
    "fsdp-becomes-ddp": ("full", "worker.present_group = lambda plan: None", "FSDP2 was planned and Distributed"),
    "bytes-stay-whole": ("qlora", "model.SHARDS_WEIGHTS = ()", "is not sharded over (2,)"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_silent_fallback_of_the_stack_stops_the_run(workplace: Workplace, name: str) -> None:
    method, taken, said = TAKEN[name]
    assert run_case(workplace, method, CASES["fsdp"], "made", TRAIN_MAX_STEPS="1").code == 0
    run = workplace.path / "runs/made"
    script = workplace.path / "without.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom sft_play.runtime import model, worker\n"
        f"{taken}\nsys.exit(worker.main(Path(sys.argv[1])))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = workplace.environ(DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false")
    done = subprocess.run([*words, str(run / "run.json")], cwd=workplace.path, env=environ, capture_output=True)
    assert done.returncode != 0
    record = json.loads((run / "record.json").read_text())
    assert record["outcome"] == "AppliedDiffersError"
    assert said in record["error"][0]
