"""FSDP2's communication as `dist` asks for it, on two real ranks: set on every unit, and the same gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny import ROOT

PROGRAM = """
import json, sys, pathlib, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from sft_play.config.schema import Config
from sft_play.runtime.communication import AllToAllReduceScatter, apply_communication

dist.init_process_group("gloo")

def train(**wanted):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model)
    config = Config.model_validate({"model": {"name": "m"}, "data": {"train": "a"}, "dist": wanted})
    done = apply_communication(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(5, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    units = [model, *model]
    states = [one._get_fsdp_state() for one in units]
    comms = {type(group._reduce_scatter_comm).__name__ for state in states for group in state._fsdp_param_groups}
    ahead = sum(len(state._states_to_forward_prefetch) for state in states)
    return {"losses": losses, "done": done, "comms": sorted(comms), "ahead": ahead}

results = {"plain": train(), "all": train(all_to_all_reduce=True), "prefetch": train(prefetch=True)}
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
"""


def test_gradients_are_the_same_and_what_is_asked_for_is_set(tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out.json"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), str(out)],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    plain, reduced, ahead = results["plain"], results["all"], results["prefetch"]
    assert plain["comms"] == ["DefaultReduceScatter"]
    assert reduced["comms"] == ["AllToAllReduceScatter"]
    assert (plain["done"], reduced["done"], ahead["done"]) == ([], ["all-to-all reduce"], ["forward prefetch"])
    assert (plain["ahead"], ahead["ahead"]) == (0, 3)
    for other in (reduced, ahead):
        assert max(abs(a - b) for a, b in zip(plain["losses"], other["losses"], strict=True)) < 1e-6
