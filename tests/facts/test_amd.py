"""AMD's cards through stand-ins for AMD's tools: both forms of each, and every way in which a tool can fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sft_play.errors import EnvironmentProblem
from sft_play.facts import amd
from sft_play.facts.amd import AmdCard, probe_amd
from sft_play.facts.gpu_state import probe_gpu_state
from sft_play.facts.hardware import GIB, LinkKind
from sft_play.facts.probe import probe_hardware
from tests.facts.fake_amd import ROCM_SMI, TWO_MI300X, install_amd_smi, install_tool, static
from tests.facts.test_probe import A100, FakeNvml

NO_NVML = FakeNvml(broken=True)


@pytest.fixture(autouse=True)
def _no_installed_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "INSTALLED_IN", "")


def test_two_cards_have_the_rates_of_the_catalog(tmp_path: Path) -> None:
    env = install_amd_smi(tmp_path, TWO_MI300X)
    hardware = probe_hardware(environment=env, nvml=NO_NVML)
    first = hardware.gpus[0]
    assert [gpu.index for gpu in hardware.gpus] == [0, 1]
    assert (first.name, first.family, first.flops, first.amd) == ("AMD Instinct MI300X", "cdna3", 1307e12, True)
    assert (first.compute_capability, first.bf16, first.fp8, first.uuid) == ("9.4", True, True, "0")
    assert 191 * GIB < first.memory_bytes <= 196592 * 2**20
    assert first.used_bytes == 20 * GIB
    assert (hardware.link, hardware.link_bytes_per_second) == (LinkKind.NVLINK, 448e9)
    assert len(hardware.notes) == 1
    assert "no plan for them is checked" in hardware.notes[0]


def test_memory_driver_and_processes_now(tmp_path: Path) -> None:
    env = install_amd_smi(tmp_path, TWO_MI300X)
    state = probe_gpu_state(probe_hardware(environment=env, nvml=NO_NVML).gpus, environment=env)
    first, second = state.gpus["0"], state.gpus["1"]
    assert (state.driver, state.cuda, first.pcie) == ("6.12.12", "", "PCIe 5.0 x16, 0000:05:00.0")
    assert first.used_bytes == 20 * GIB
    assert 170 * GIB < first.free_bytes < 172 * GIB
    assert [(one.pid, one.name, one.used_bytes) for one in first.processes] == [(77, "python3", GIB)]
    assert second.processes == ()


def test_the_older_form_is_a_list_and_warnings_may_stand_before_it(tmp_path: Path) -> None:
    older = {name: told.get("gpu_data") if isinstance(told, dict) else told for name, told in TWO_MI300X.items()}
    warned = install_amd_smi(tmp_path, older, before="WARNING: [AMD/ATI] user is not in the render group\n[not json")
    assert len(probe_amd(warned).cards) == 2


def test_rocm_smi_where_amd_smi_is_missing(tmp_path: Path) -> None:
    env = install_tool(tmp_path, "rocm-smi", f"print(json.dumps({ROCM_SMI!r}))")
    hardware = probe_hardware(environment=env, nvml=NO_NVML)
    (gpu,) = hardware.gpus
    assert (gpu.family, gpu.used_bytes, gpu.compute_capability) == ("cdna3", 297500672, "9.4")
    assert hardware.link is LinkKind.NONE
    assert probe_gpu_state(hardware.gpus, environment=env).driver == "6.8.5"


def test_an_amd_smi_without_an_answer_leaves_it_to_rocm_smi(tmp_path: Path) -> None:
    install_tool(tmp_path, "amd-smi", "print('[]')")
    env = install_tool(tmp_path, "rocm-smi", f"print(json.dumps({ROCM_SMI!r}))")
    answer = probe_amd(env)
    assert len(answer.cards) == 1
    assert answer.notes == ("amd-smi answers and lists no GPU: what it knows of AMD GPUs is unknown",)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print('no such thing'); sys.exit(3)", "ended with 3 and no JSON (no such thing)"),
        ('print(\'{"gpu_data": [{"gpu"\')', "ended with 0 and no JSON"),
        ("sys.exit('amdgpu not loaded')", "ended with 1 and no JSON (amdgpu not loaded)"),
        ("print(json.dumps({'gpu_data': 'N/A'}))", "answers and lists no GPU"),
        ("print(json.dumps([[1], None, {'gpu': 'x'}]))", "answers and lists no GPU"),
        ("sys.stdout.buffer.write(bytes(range(256)))", "no JSON"),
    ],
)
def test_rubbish_is_one_line_and_no_crash(tmp_path: Path, body: str, said: str) -> None:
    hardware = probe_hardware(environment=install_tool(tmp_path, "amd-smi", body), nvml=NO_NVML)
    assert hardware.gpus == ()
    assert len(hardware.notes) == 2
    assert "no GPU seen by NVML" in hardware.notes[0]
    assert said in hardware.notes[1]
    assert "\n" not in hardware.notes[1]


def test_a_tool_that_hangs_is_ended_and_said(tmp_path: Path) -> None:
    env = install_tool(tmp_path, "amd-smi", "time.sleep(60)")
    started = time.monotonic()
    answer = probe_amd(env, timeout_seconds=0.5)
    assert time.monotonic() - started < 20
    assert answer.cards == ()
    assert "did not answer in 0.5 s" in answer.notes[0]


def test_a_file_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    tool = tmp_path / "amd-smi"
    tool.write_bytes(b"\x7fELF not a program")
    tool.chmod(0o755)
    assert "cannot be run" in probe_amd({"PATH": str(tmp_path)}).notes[0]


def test_fields_that_are_missing_are_unknown_and_not_fatal(tmp_path: Path) -> None:
    bare = {"static": [{"gpu": 0, "asic": "N/A", "vram": {"size": "N/A"}}], "metric": [{"gpu": 0}], "process": {}}
    assert probe_amd(install_amd_smi(tmp_path, bare)).cards == ()
    half = {"static": {"gpu_data": [static(3)]}}  # metric and process end with an error
    answer = probe_amd(install_amd_smi(tmp_path, half))
    assert [(card.index, card.used_bytes) for card in answer.cards] == [(3, 0)]
    assert "memory in use unknown" in answer.notes[0]
    assert "processes unknown" in answer.notes[1]


def test_an_integrated_gpu_is_left_out_and_an_unknown_card_has_memory_only(tmp_path: Path) -> None:
    cards = [
        static(0, name="Raphael", target="gfx1036", mib=64),
        static(1, name="AMD Odd 1", target="gfx1101", mib=16368),
    ]
    env = install_amd_smi(tmp_path, TWO_MI300X | {"static": {"gpu_data": cards}})
    hardware = probe_hardware(environment=env, nvml=NO_NVML)
    (gpu,) = hardware.gpus
    assert (gpu.index, gpu.flops, gpu.memory_bytes, gpu.bf16, gpu.fp8) == (1, 0.0, 16368 * 2**20, True, False)
    assert any("AMD GPU 0 (Raphael) is left out" in note for note in hardware.notes)


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "0"}, [1, 0]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visible_devices(tmp_path: Path, variables: dict[str, str], left: list[int]) -> None:
    env = install_amd_smi(tmp_path, TWO_MI300X) | variables
    hardware = probe_hardware(environment=env, nvml=NO_NVML)
    assert [gpu.index for gpu in hardware.gpus] == left
    assert left or any("HIP_VISIBLE_DEVICES hides every GPU" in note for note in hardware.notes)


def test_numbers_are_hips(tmp_path: Path) -> None:
    """With graphics in the processor the tool counts it first and HIP last."""
    cards = [static(0, name="Raphael", target="gfx1036", mib=64), static(1)]
    answers = TWO_MI300X | {"static": cards, "list": [{"gpu": 0, "hip_id": 1}, {"gpu": 1, "hip_id": 0}]}
    (gpu,) = probe_hardware(environment=install_amd_smi(tmp_path, answers), nvml=NO_NVML).gpus
    assert (gpu.name, gpu.index, gpu.uuid) == ("AMD Instinct MI300X", 0, "0")


def test_a_card_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    env = install_amd_smi(tmp_path, TWO_MI300X) | {"HIP_VISIBLE_DEVICES": "5"}
    with pytest.raises(EnvironmentProblem, match=r"HIP_VISIBLE_DEVICES.*amd-smi list"):
        probe_hardware(environment=env, nvml=NO_NVML)


def test_amds_tools_are_not_run_where_nvml_has_gpus_or_is_told_to_hide_them(tmp_path: Path) -> None:
    env = install_tool(tmp_path, "amd-smi", "open(sys.argv[0] + '.ran', 'w')")
    probe_hardware(environment=env, nvml=FakeNvml(A100))
    probe_hardware(environment=env | {"CUDA_VISIBLE_DEVICES": ""}, nvml=FakeNvml(A100))
    assert not list(tmp_path.glob("*.ran"))
    probe_hardware(environment=env, nvml=NO_NVML)
    assert list(tmp_path.glob("*.ran"))


@pytest.mark.parametrize(
    ("target", "capability", "bf16"),
    [("gfx90a", "9.0", True), ("gfx950", "9.5", True), ("gfx1030", "10.3", False), ("gfx1201", "12.0", True),
     ("gfx906", "9.0", False), ("", "", False), ("N/A", "", False)],
)  # fmt: skip
def test_what_a_target_can_do(target: str, capability: str, bf16: bool) -> None:
    card = AmdCard(index=0, name="x", bus="b", total_bytes=1, used_bytes=0, graphics=target)
    assert (card.capability, card.bf16) == (capability, bf16)
