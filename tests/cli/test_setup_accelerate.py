"""`make setup-accelerate`: detects without asking, asks on a terminal, and what it writes counts and loads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.cli import setup_accelerate
from sft_play.cli.config import main as show_config
from sft_play.config.setup_file import SETUP_FILE
from tests.cli.fake_gpus import TwoGpus, install
from tests.tiny import ROOT


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded_by_accelerate() -> object:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(SETUP_FILE))


def command(**variables: str) -> dict[str, object]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {
        "args": [sys.executable, "-m", "sft_play", "setup-accelerate"],
        "env": {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables},
    }


def test_two_gpus_are_written_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, TwoGpus())
    assert setup_accelerate.main([], {}) == 0
    assert SETUP_FILE.read_text() in capsys.readouterr().out
    loaded = loaded_by_accelerate()
    assert (loaded.num_processes, loaded.mixed_precision, loaded.num_machines) == (2, "bf16", 1)
    assert (loaded.distributed_type.value, loaded.use_cpu) == ("MULTI_GPU", False)
    Path("x.yaml").write_text("model: {name: m}\ndata: {train: a}\n")
    show_config([], {"CONFIG": "x.yaml"})
    shown = capsys.readouterr().out
    assert ".sft-play/accelerate.yaml:7 (setup-accelerate)" in shown
    assert "2 from setup-accelerate" in shown


def test_a_machine_without_a_gpu_gets_what_is_true_there() -> None:
    done = subprocess.run(**command(), capture_output=True, text=True, check=True)
    assert SETUP_FILE.read_text() in done.stdout
    loaded = loaded_by_accelerate()
    assert (loaded.num_processes, loaded.use_cpu, loaded.distributed_type.value) == (1, True, "NO")


def test_an_earlier_file_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    SETUP_FILE.parent.mkdir()
    SETUP_FILE.write_text("num_processes: 7\n")
    setup_accelerate.main([], {"CUDA_VISIBLE_DEVICES": ""})
    assert SETUP_FILE.with_suffix(".yaml.old").read_text() == "num_processes: 7\n"
    setup_accelerate.main([], {"CUDA_VISIBLE_DEVICES": ""})
    assert capsys.readouterr().out.count("the earlier one is kept") == 1


@pytest.mark.parametrize(("value", "said"), [("1", "there is no terminal to ask on"), ("yes", "INTERACTIVE is 'yes'")])
def test_without_a_terminal_it_does_not_ask(value: str, said: str) -> None:
    done = subprocess.run(
        **command(INTERACTIVE=value), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not SETUP_FILE.exists()


def test_a_person_is_asked_on_a_terminal() -> None:
    """Wrong answers are asked again; Enter takes what was found."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(**command(INTERACTIVE="1"), stdin=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    os.write(mine, b"two\n2\nfp16\n\n2\n1\nnode 0\n29501\n")
    out, _ = process.communicate(timeout=60)
    os.close(mine)
    assert process.returncode == 0, out
    assert "a whole number from 1 to 64" in out
    assert "one of bf16, no" in out
    loaded = loaded_by_accelerate()
    assert (loaded.num_processes, loaded.num_machines, loaded.machine_rank) == (4, 2, 1)
    assert (loaded.main_process_ip, loaded.main_process_port, loaded.mixed_precision) == ("node 0", 29501, "bf16")
