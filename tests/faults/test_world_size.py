"""A run that goes on with another number of ranks: the global batches of the straight run, in its order."""

from __future__ import annotations

import shutil

import pytest

from tests.distributed.runs import Outcome
from tests.tiny import Workplace, make_rows

TRAIN = {
    "batch_size": "auto", "grad_accum": "auto", "global_batch_size": 8, "max_steps": 10, "save_steps": 4,
    "learning_rate": 1e-3, "eval_strategy": "no", "warmup": 0, "bf16": False,
}  # fmt: skip


def run(workplace: Workplace, name: str, ranks: int, *words: str) -> Outcome:
    variables = {"NUM_GPUS": str(ranks), "TRAIN_BATCH_SIZE": str(4 // ranks), "RUN_NAME": name}
    if ranks > 1:
        variables["DIST_STRATEGY"] = "ddp"
    done = workplace.run("train-distributed", *words, CONFIG="size.yaml", **variables)
    assert done.code == 0, done.out + done.err
    return Outcome(workplace.path / "runs" / name)


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(1, 2, marks=pytest.mark.fault), pytest.param(2, 1, marks=pytest.mark.fault)]
)
def test_the_sequence_of_global_batches_is_kept(workplace: Workplace, before: int, after: int) -> None:
    """Epochs end in the middle of the run; the losses of other rows are far apart."""
    make_rows(workplace.path / "train.jsonl", 44)
    workplace.write("size.yaml", train=TRAIN, run={"report_to": []})
    straight = run(workplace, "straight", before)
    stopped = Outcome(shutil.copytree(straight.path, workplace.path / "runs/stopped"))
    shutil.rmtree(stopped.path / "checkpoints/step-10")
    shutil.rmtree(stopped.path / "checkpoints/step-8", ignore_errors=True)
    (stopped.path / "record.json").unlink()
    resumed = run(workplace, "stopped", after)
    assert resumed.record["stamp"]["world_size"] == after
    assert [event["step"] for event in resumed.steps] == list(range(1, 11))
    assert resumed.series("loss") == pytest.approx(straight.series("loss"), abs=5e-6)
    losses = straight.series("loss")
    assert min(abs(a - b) for n, a in enumerate(losses) for b in losses[:n]) > 5e-5
