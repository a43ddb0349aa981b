"""`make verify-resume` on a small run, and that it sees a difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sft_play.cli.verify_resume import compare
from sft_play.record.manifest import write_manifest
from sft_play.record.run_dir import RunDir
from tests.tiny import Workplace


@pytest.mark.fault
def test_a_run_with_dropout_and_packing_is_proved(workplace: Workplace) -> None:
    workplace.config["tuning"] = {"mode": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    workplace.write(data={**workplace.config["data"], "packing": True})
    done = workplace.run("verify-resume", "--steps", "40", CONFIG="tiny.yaml")
    assert done.code == 0, done.out + done.err
    assert done.out.count(" equal ") == 5
    assert "a stopped run of this config goes on to the bit" in done.out
    assert "DIFFERS" not in done.out
    folder = workplace.path / "runs/.cache/verify-resume"
    assert len(list((folder / "stopped/attempts").iterdir())) == 2

    # The comparison bites: one loss, or one byte of a file, apart.
    straight, stopped = RunDir(folder / "straight"), RunDir(folder / "stopped")
    lines = stopped.metrics.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if json.loads(line)["event"] == "train")
    event = json.loads(lines[last])
    lines[last] = json.dumps({**event, "loss": event["loss"] + 1e-7})
    stopped.metrics.write_text("\n".join(lines) + "\n")
    other = Path(shutil.copytree(stopped.adapter, folder / "other"))
    (other / "adapter_model.safetensors").write_bytes(b"other")
    (other / "manifest.json").unlink()
    write_manifest(other, {})
    shutil.rmtree(stopped.adapter)
    other.rename(stopped.adapter)
    found = {verdict.name: verdict for verdict in compare(straight, stopped)}
    assert not found["loss"].equal
    assert found["result"].words == "adapter_model.safetensors"
    assert found["last checkpoint"].equal


def test_too_few_steps(workplace: Workplace) -> None:
    (line,) = workplace.run("verify-resume", "--steps", "2", CONFIG="tiny.yaml").error_lines
    assert "4 steps are the fewest" in line
