"""What the upstream Trainer makes of the same faults: it passes each of these, so a check of ours can fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import Workplace, make_rows

pytestmark = pytest.mark.fault

PLAIN = """
import sys
from pathlib import Path
from tests.faults.test_negative_controls import make_trainer

trainer = make_trainer(Path(sys.argv[1]), **{settings})
{before}
trainer.train()
"""


def make_trainer(folder: Path, *, out: str = "out", hook: Callable[[Any], None] | None = None, **settings: Any) -> Any:
    """trl's own trainer on the model and rows of a workplace, saving every second step.

    Args:
        hook: called with the trainer after each micro-batch's backward pass.
    """
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Plain(SFTTrainer):
        def training_step(self, *items: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*items, **named)
            if hook:
                hook(self)
            return loss

    model = (folder / "model").read_text()
    defaults = {
        "output_dir": str(folder / out), "max_length": 128, "per_device_train_batch_size": 4, "max_steps": 4,
        "save_steps": 2, "logging_steps": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant", "report_to": [],
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    rows = load_dataset(
        "json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "hf-cache")
    )
    return Plain(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(**{**defaults, **settings}),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model),
    )


@pytest.fixture
def folder(workplace: Workplace) -> Path:
    """A workplace that knows its model, for a trainer in this or in another process."""
    (workplace.path / "model").write_text(str(workplace.model))
    return workplace.path


def start_plain(folder: Path, before: str = "", **settings: Any) -> subprocess.Popen[str]:
    script = folder / "plain.py"
    script.write_text(PLAIN.format(settings=settings, before=before))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=Workplace(folder, folder).environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_flipped_bit_in_the_weights_is_loaded(folder: Path) -> None:
    make_trainer(folder).train()
    file = folder / "out/checkpoint-4/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)
    trainer = make_trainer(folder, max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_a_checkpoint_without_its_optimizer_goes_on_without_it(folder: Path) -> None:
    make_trainer(folder).train()
    straight = make_trainer(folder, max_steps=6, out="straight")
    straight.train()
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / "out/checkpoint-4" / name).unlink()
    trainer = make_trainer(folder, max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    losses = [[one["loss"] for one in each.state.log_history if "loss" in one] for each in (straight, trainer)]
    assert losses[0][:5] == losses[1][:5]
    assert losses[0][5] != losses[1][5]


def test_a_kill_inside_a_save_leaves_a_checkpoint_that_is_taken(folder: Path) -> None:
    """Killed once the weights are there, before the optimizer is."""
    dying = "trainer._save_optimizer_and_scheduler = lambda *_: __import__('os').kill(__import__('os').getpid(), 9)"
    process = start_plain(folder, dying)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert (folder / "out/checkpoint-2/model.safetensors").is_file()
    assert not (folder / "out/checkpoint-2/optimizer.pt").exists()
    from transformers.trainer_utils import get_last_checkpoint

    assert get_last_checkpoint(str(folder / "out")) == str(folder / "out/checkpoint-2")


def test_a_full_disk_in_a_save_leaves_a_half_checkpoint(folder: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(folder)
    trainer._save_optimizer_and_scheduler = full
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert (folder / "out/checkpoint-2/model.safetensors").is_file()


def test_sigterm_loses_what_was_not_saved(folder: Path) -> None:
    process = start_plain(folder, max_steps=100_000, save_steps=50_000)
    assert process.stdout is not None
    for line in process.stdout:
        if "'loss'" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert not list(folder.glob("out/checkpoint-*"))


def test_a_gradient_that_is_not_finite_is_applied_and_saved(folder: Path) -> None:
    def poison(trainer: Any) -> None:
        if trainer.state.global_step == 2:
            next(trainer.model.parameters()).grad.fill_(float("nan"))

    trainer = make_trainer(folder, hook=poison)
    trainer.train()
    assert trainer.state.global_step == 4
    from safetensors.torch import load_file

    saved = load_file(folder / "out/checkpoint-4/model.safetensors")
    assert any(weight.isnan().any() for weight in saved.values())


def test_a_row_loses_its_whole_answer_without_a_word(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = {"prompt": "1 and 1?", "completion": " 2"}
    long = {"prompt": "x " * 300, "completion": " yes"}
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, [short, long, short, long])) + "\n")
    trainer = make_trainer(folder)
    assert len(trainer.train_dataset) == 2
    out, err = capfd.readouterr()
    assert "warn" not in (out + err).lower().replace("futurewarning", "").replace("warnings.warn", "")


def test_another_learning_rate_and_other_rows_go_on_as_the_same_run(folder: Path) -> None:
    make_trainer(folder).train()
    make_rows(folder / "train.jsonl", 32, first=700)
    trainer = make_trainer(folder, max_steps=6, learning_rate=0.5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_rotation_counts_a_stranger_and_deletes_every_checkpoint_of_the_run(folder: Path) -> None:
    stranger = folder / "out/checkpoint-1000"
    stranger.mkdir(parents=True)
    (stranger / "notes.txt").write_text("of somebody else")
    later = time.time() + 3600  # upstream goes by age, and by number only where all are of one second
    os.utime(stranger, (later, later))
    make_trainer(folder, save_total_limit=1).train()
    assert [path.name for path in (folder / "out").glob("checkpoint-*")] == ["checkpoint-1000"]


def test_two_runs_write_into_one_folder(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    both = [start_plain(folder), start_plain(folder)]
    for process in both:
        process.communicate(timeout=180)
    assert [process.returncode for process in both] == [0, 0]


def test_a_step_that_runs_out_of_memory_ends_the_run(folder: Path) -> None:
    def full(trainer: Any) -> None:
        if trainer.state.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(folder, hook=full).train()
