"""What `setup-accelerate` wrote is the lowest layer of a config, with its own origin, and is never half believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.config.origin import OriginKind, Resolved
from sft_play.config.resolve import resolve
from sft_play.errors import SeveralErrors

WRITTEN = """\
# a comment
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 8
mixed_precision: bf16
num_machines: 2
machine_rank: 1
main_process_ip: node0
main_process_port: 29500
same_network: true
"""


def resolved(text: str, config: str = "", *, distributed: bool = True, **environ: str) -> Resolved:
    Path(".sft-play").mkdir(exist_ok=True)
    Path(".sft-play/accelerate.yaml").write_text(text)
    Path("x.yaml").write_text(f"model: {{name: m}}\ndata: {{train: a}}\n{config}")
    return resolve(Path("x.yaml"), environ, distributed=distributed)


def refused(text: str) -> list[str]:
    with pytest.raises(SeveralErrors) as caught:
        resolved(text)
    return caught.value.lines()


def test_every_value_counts_and_knows_its_line() -> None:
    found = resolved(WRITTEN)
    dist = found.config.dist
    assert (dist.gpus, dist.num_nodes, dist.node_rank, dist.main_address, dist.main_port) == (4, 2, 1, "node0", 29500)
    assert found.config.train.bf16 is True
    origin = found.origins["dist.gpus"]
    assert (origin.kind, origin.where) == (OriginKind.SETUP, ".sft-play/accelerate.yaml:4 (setup-accelerate)")


def test_a_plain_train_takes_the_precision_and_no_gpus() -> None:
    found = resolved(WRITTEN, distributed=False)
    assert (found.config.dist.gpus, found.config.dist.num_nodes, found.config.train.bf16) == (None, 1, True)


def test_a_file_and_the_environment_are_stronger() -> None:
    found = resolved(WRITTEN, "dist: {gpus: 2}\n", NUM_NODES="1", NODE_RANK="0", DIST_MAIN_ADDRESS="none")
    assert (found.config.dist.gpus, found.config.dist.num_nodes) == (2, 1)
    assert found.origins["dist.gpus"].overrode[0].kind is OriginKind.SETUP


def test_another_precision_in_the_file_is_no_contradiction() -> None:
    train = resolved(WRITTEN, "train: {fp16: true}\n").config.train
    assert (train.bf16, train.fp16) == ("auto", True)


def test_a_described_machine_is_not_this_one() -> None:
    found = resolved(WRITTEN, HARDWARE="8xH100-80")
    assert (found.config.dist.gpus, found.config.train.bf16) == (None, "auto")


def test_a_deepspeed_file_is_stronger_than_what_was_detected() -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}')
    found = resolved("num_processes: 2\nmixed_precision: bf16\n", "dist: {deepspeed_config: ds.json}\n")
    assert found.config.train.bf16 is False


def test_ids_and_fp16() -> None:
    found = resolved("num_processes: 2\ngpu_ids: 1,3\nmixed_precision: fp16\n")
    assert (found.config.dist.gpus, found.config.train.fp16) == ((1, 3), True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("num_proceses: 2", "unknown key num_proceses, nearest is num_processes"),
        ("num_processes: many", "num_processes takes a whole number from 1 on, not many"),
        ("num_processes: 0", "num_processes takes a whole number from 1 on, not 0"),
        ("{num_processes: 3, num_machines: 2}", "3 cannot be shared evenly by 2 machines"),
        ("{num_processes: 3, gpu_ids: '0,1'}", "is not one for each of gpu_ids"),
        ("gpu_ids: first", "gpu_ids takes all, or numbers like 0,1, not first"),
        ("mixed_precision: fp8", "mixed_precision takes bf16, fp16 or no, not fp8"),
        ("distributed_type: FSDP", "distributed_type takes NO, MULTI_GPU, MULTI_CPU here, not FSDP"),
        ("fsdp_config: {fsdp_version: 2}", "fsdp_config cannot be set here -> set dist.strategy: fsdp"),
        ("debug: true", "debug takes false here, not true"),
        ("main_training_function: run", "main_training_function takes main here"),
        ("[1, 2]", "the file holds no keys"),
        ("a: [", "not valid YAML"),
        ("{num_processes: 2, num_machines: 2}", "needs dist.main_address"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_place(line: str, said: str) -> None:
    (error,) = [one for one in refused(f"{line}\n") if said in one]
    assert error.startswith(".sft-play/accelerate.yaml") or "main_address" in said
    assert " -> " in error or "nearest" in error
