"""Every strategy is the same run: losses, gradient norms, final weights and their types, against one process."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.distributed.runs import CASES, SINGLE, STEPS, Case, Outcome, run_case, shared_run
from tests.tiny import Workplace

EXACT = [(method, case) for method in ("full", "lora") for case in CASES if (method, case) != ("lora", "tp")]
# A head that trains beside an adapter lies in a unit of its own under FSDP2.
EXACT += [("lora-head", name) for name in ("fsdp", "hsdp", "zero3")]
# bf16 products depend on the shape of the batch, and FSDP and ZeRO gather full weights in bf16.
ROUNDED = [
    ("full-bf16", "fsdp"),
    ("full-bf16", "zero2"),
    ("full-bf16", "zero3"),
    ("lora-bf16", "ddp"),
    ("lora-bf16", "fsdp"),
    ("lora-bf16", "zero2"),
    ("lora-bf16", "zero3"),
    ("qlora", "ddp"),
    ("qlora", "fsdp"),
    ("qlora", "zero2"),
    ("qlora", "zero3"),
]
# One representative a family runs in `make test`, the whole product in `make test-all`.
LONG = {
    *(("full", name) for name in ("hsdp", "zero1", "zero2-offload", "zero3", "zero3-offload", "zero3-params")),
    *(
        ("lora", name)
        for name in ("ddp", "hsdp", "zero1", "zero2", "zero2-offload", "zero3-offload", "zero3-params", "zero3")
    ),
    *(("lora-head", name) for name in ("fsdp", "hsdp", "zero3")),
    *(("full-bf16", name) for name in ("fsdp", "zero2", "zero3")),
    *(("lora-bf16", name) for name in ("ddp", "fsdp", "zero2", "zero3")),
    *(("qlora", name) for name in ("ddp", "zero2", "zero3")),
}
ROUNDED_BOUND = 5e-3
# Adam's first steps have the length of the learning rate whatever the gradient: noise in a tiny one turns its sign.
ROUNDED_STEP = STEPS * 1e-3


def marked(pairs: list[tuple[str, str]]) -> list[ParameterSet]:
    """The pairs as parameters, those of `LONG` marked slow."""
    return [pytest.param(*pair, marks=pytest.mark.slow if pair in LONG else ()) for pair in pairs]


def assert_applied(outcome: Outcome, single: Outcome, case: Case) -> None:
    """The strategy was really there: the wrapper's type, and the numbers that rank 0 trained and held."""
    applied, trained = outcome.record["applied"], single.record["trainable_parameters"]
    assert applied["wrapper"].startswith(case.wrapper)
    assert applied["shards"] == case.shards
    held = applied["trained_numbers_here"] / trained
    if applied["wrapper"] == "DeepSpeedEngine" and "zero3" not in case.name:
        assert held == 1  # weights are whole there; the optimizer's state is what lies in shards
    elif case.shards > 1:
        assert held == pytest.approx(1 / case.shards, abs=0.02)
    else:
        assert held == 1


def assert_same_result(outcome: Outcome, single: Outcome, bound: float) -> None:
    ours, theirs = outcome.weights, single.weights
    assert set(ours) == set(theirs)
    assert {name: weight.dtype for name, weight in ours.items()} == {n: w.dtype for n, w in theirs.items()}
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < bound


@pytest.mark.parametrize(("method", "name"), marked(EXACT))
def test_a_strategy_gives_the_curve_and_the_weights_of_one_process(shared: Workplace, method: str, name: str) -> None:
    case = CASES[name]
    single, outcome = shared_run(shared, method, SINGLE), shared_run(shared, method, case)
    assert_applied(outcome, single, case)
    losses, wanted = outcome.series("loss"), single.series("loss")
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(wanted[0], abs=1e-6)
    assert losses == pytest.approx(wanted, abs=5e-5)
    assert outcome.series("grad_norm") == pytest.approx(single.series("grad_norm"), abs=5e-5)
    assert_same_result(outcome, single, 1e-5)


@pytest.mark.parametrize(("method", "name"), marked(ROUNDED))
def test_in_16_bits_the_curves_stay_within_rounding(shared: Workplace, method: str, name: str) -> None:
    case = CASES[name]
    single, outcome = shared_run(shared, method, SINGLE), shared_run(shared, method, case)
    assert_applied(outcome, single, case)
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=ROUNDED_BOUND)
    adapters = method != "full-bf16"
    if adapters:
        assert {weight.dtype for weight in outcome.weights.values()} == {torch.float32}
        assert_same_result(outcome, single, ROUNDED_STEP)


@pytest.mark.parametrize(
    ("rows", "sums", "ranks"),
    [(4, 2, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 1, 2), (1, 4, 2)))],
)
def test_the_batch_may_be_split_in_any_way(shared: Workplace, rows: int, sums: int, ranks: int) -> None:
    """8 x 1, 4 x 2, two ranks x 4 x 1 and two ranks x 1 x 4: the loss is averaged over tokens, not rows."""
    single = shared_run(shared, "full", SINGLE)
    case = CASES["ddp"] if ranks > 1 else SINGLE
    name = f"split-{rows}-{sums}-{ranks}"
    done = run_case(
        shared, "full", case, name, TRAIN_BATCH_SIZE=str(rows), TRAIN_GRAD_ACCUM=str(sums), RUN_RESUME="never"
    )
    assert done.code == 0, done.err
    outcome = Outcome(shared.path / "runs" / name)
    assert outcome.series("loss") == pytest.approx(single.series("loss"), abs=5e-6)
    assert outcome.series("grad_norm") == pytest.approx(single.series("grad_norm"), abs=5e-6)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_under_tensor_parallel_are_refused_by_name_before_anything_loads(
    workplace: Workplace, method: str
) -> None:
    done = run_case(workplace, method, CASES["tp"], "refused")
    assert done.code == 2
    assert "tensor-parallel" in done.error_lines[0]
    assert "dist.strategy" in done.error_lines[0]
    assert "loading" not in done.out
