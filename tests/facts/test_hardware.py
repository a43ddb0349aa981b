"""Described machines and the catalog of cards."""

from __future__ import annotations

import pytest

from sft_play.errors import UsageError
from sft_play.facts.hardware import GIB, LinkKind, find_gpu, parse_hardware


@pytest.mark.parametrize(
    ("text", "nodes", "count", "card"),
    [
        ("2xH100-80", 1, 2, "H100-80"),
        ("2x8xA100-80", 2, 8, "A100-80"),
        ("1xRTX4090", 1, 1, "RTX4090"),
        ("4xH200", 1, 4, "H200"),
        ("2xrtx 4090", 1, 2, "RTX4090"),
        ("1xT4", 1, 1, "T4"),
        ("T4", 1, 1, "T4"),
        ("8xA100-40GB", 1, 8, "A100-40"),
        ("1xA100", 1, 1, "A100-80"),
        ("2xRTX3090Ti", 1, 2, "RTX3090Ti"),
        ("8xMI300X", 1, 8, "MI300X"),
        ("1xV100-32", 1, 1, "V100-32"),
    ],
)
def test_a_description_names_machines_gpus_and_card(text: str, nodes: int, count: int, card: str) -> None:
    hardware = parse_hardware(text)
    assert (hardware.nodes, len(hardware.gpus), hardware.gpus[0].name) == (nodes, count, card)
    assert hardware.world_size == nodes * count
    assert hardware.described


def test_cpu_is_a_machine_without_gpus() -> None:
    hardware = parse_hardware("cpu")
    assert hardware.gpus == ()
    assert hardware.world_size == 1


@pytest.mark.parametrize("text", ["", "0xH100", "2x", "H900", "2xH100-33", "xx", "-1xT4", "99999xT4"])
def test_what_is_no_machine_is_an_error_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match="2xH100-80"):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", 0, "A100-80"),
        ("NVIDIA A100 80GB PCIe", 0, "A100-80-PCIe"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100-80"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX4090"),
        ("NVIDIA GeForce RTX 4070 Ti", 12, "RTX4070Ti"),
        ("Tesla V100-SXM2-16GB", 0, "V100-16"),
        ("H100-96GB HBM2e (500W)", 0, "H100-96"),
        ("B200 (power limited)", 0, "B200"),
        ("NVIDIA GeForce GTX 1080", 8, None),
    ],
)
def test_driver_names_find_their_card(name: str, gib: float, card: str | None) -> None:
    gpu = find_gpu(name, int(gib * GIB))
    assert (gpu.name if gpu else None) == card


def test_links_are_those_of_the_card() -> None:
    assert parse_hardware("2xH100-80").link is LinkKind.NVLINK
    assert parse_hardware("2xRTX4090").link is LinkKind.PCIE
    assert parse_hardware("1xH100-80").link is LinkKind.NONE


def test_turing_and_volta_have_no_bf16_and_hopper_has_fp8() -> None:
    assert not parse_hardware("1xT4").gpus[0].bf16
    assert not parse_hardware("1xV100-16").gpus[0].bf16
    assert parse_hardware("1xRTX4090").gpus[0].fp8
    assert not parse_hardware("1xA100").gpus[0].fp8


@pytest.mark.parametrize(
    ("text", "name"), [("2x4090", "RTX4090"), ("2x8x3090", "RTX3090"), ("4060ti-16", "RTX4060Ti-16")]
)
def test_geforce_cards_are_called_by_their_digits_too(text: str, name: str) -> None:
    assert parse_hardware(text).gpus[0].name == name


@pytest.mark.parametrize(("text", "said"), [("3xFOO", "known are T4, "), ("1xH20O", "did you mean H200?")])
def test_a_card_that_is_not_known(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="no card called") as caught:
        parse_hardware(text)
    assert said in caught.value.line()
