"""`make memory-check`: what the GPUs hold now and for whom, beside what the plan of CONFIG needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.cli.inputs import planning_facts
from sft_play.cli.options import Options
from sft_play.cli.plan import cached_data
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import resolve
from sft_play.errors import ExitCode
from sft_play.facts.gpu_state import DriverState, GpuProcess, probe_gpu_state
from sft_play.facts.hardware import GIB, Gpu, Hardware
from sft_play.facts.probe import probe_hardware
from sft_play.facts.ram import probe_free_ram_bytes
from sft_play.plan.build import PlanInputs, choose, does_not_fit, gib
from sft_play.plan.select import allowed_layouts, select_gpus
from sft_play.plan.strategy import Candidate

NOTHING_ASKED = "nothing to compare with; CONFIG=configs/demo.yaml beside it says whether that run fits now"


@dataclass(frozen=True, kw_only=True)
class MemoryNow:
    """What is free on this machine now.

    Attributes:
        hardware: with all GPUs that are visible.
    """

    hardware: Hardware
    state: DriverState
    ram_free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the plan of a config needs.

    Attributes:
        gpus: those it takes.
        gpu_bytes: on each of them; 0 without GPUs.
        ram_bytes: of the whole run: the model itself on a CPU, what is offloaded beside GPUs.
    """

    words: str
    gpus: tuple[Gpu, ...]
    gpu_bytes: int
    ram_bytes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether it fits now, and what to say of it."""

    fits: bool
    text: str


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the memory in use and, where CONFIG is given, whether its plan fits into what is free.

    Returns:
        0 where it fits or nothing was asked, 4 where it does not fit now.

    Raises:
        SftPlayError: the config, the model or the visible GPUs are not what they should be.
    """
    Options(prog="make memory-check", description=__doc__).parse_args(list(argv))
    inputs = plan_inputs(environ) if environ.get("CONFIG") else None
    hardware = probe_hardware(environment=environ)
    state = probe_gpu_state(hardware.gpus, environment=environ)
    now = MemoryNow(hardware=hardware, state=state, ram_free_bytes=probe_free_ram_bytes())
    print("\n".join(render_use(now)))
    if inputs is None:
        print(f"verdict: {NOTHING_ASKED}")
        return ExitCode.DONE
    choice = choose(inputs)
    if choice.chosen is None:
        refusal = does_not_fit(inputs, choice)
        print(f"verdict: does not fit, even when nothing else runs: {refusal.what} -> {refusal.fix}")
        return ExitCode.ENVIRONMENT
    need = need_of(choice.chosen, inputs.hardware)
    print(f"plan    {need.words}")
    verdict = judge(need, now)
    print(f"verdict: {verdict.text}")
    return ExitCode.DONE if verdict.fits else ExitCode.ENVIRONMENT


def plan_inputs(environ: Mapping[str, str]) -> PlanInputs:
    """What `make plan` would plan from, on this machine."""
    config = resolve(Path(environ["CONFIG"]), environ, distributed=True, inputs=INPUTS_OF["memory-check"]).config
    return PlanInputs(
        config=config,
        hardware=select_gpus(probe_hardware(environment=environ), config.dist.gpus, default_count=None),
        facts=planning_facts(config),
        data=cached_data(config),
        only=allowed_layouts(config),
    )


def need_of(candidate: Candidate, hardware: Hardware) -> Need:
    """The chosen layout's need, in figures and in words."""
    memory, settings, gpus = candidate.memory, candidate.settings, hardware.gpus
    gpu_bytes = memory.needed_bytes if gpus else 0
    ram_bytes = memory.host_bytes * len(gpus) if gpus else memory.allocated_bytes
    each = f"{gib(gpu_bytes)} GiB on each GPU" if gpus else f"{gib(ram_bytes)} GiB of RAM on the CPU"
    beside = f", {gib(ram_bytes)} GiB of RAM" if gpus and ram_bytes else ""
    where = f" over {len(gpus)} GPUs" if len(gpus) > 1 else ""
    return Need(
        words=f"{candidate.layout.name}{where} needs {each}{beside}, at {settings.micro_batch} rows of "
        f"{settings.seq_len:,} tokens",
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        ram_bytes=ram_bytes,
    )


def judge(need: Need, now: MemoryNow) -> Verdict:
    """Whether every GPU that the plan takes, and the RAM, have enough free now; if not, what is in the way."""
    free = {gpu.uuid: now.state.gpus[gpu.uuid].free_bytes for gpu in need.gpus}
    short = [gpu for gpu in need.gpus if free[gpu.uuid] < need.gpu_bytes]
    if short:
        gpu = min(short, key=lambda one: free[one.uuid])
        what = f"GPU {gpu.index} has {gib(free[gpu.uuid])} GiB free of the {gib(need.gpu_bytes)} GiB that are needed"
        return Verdict(fits=False, text=f"does not fit now: {what}; {_in_the_way(now, gpu)}")
    if need.ram_bytes > now.ram_free_bytes:
        what = f"{gib(now.ram_free_bytes)} GiB of RAM are free of the {gib(need.ram_bytes)} GiB that are needed"
        return Verdict(fits=False, text=f"does not fit now: {what}; end what else runs, or take a smaller batch")
    left = min((free[gpu.uuid] - need.gpu_bytes for gpu in need.gpus), default=now.ram_free_bytes - need.ram_bytes)
    return Verdict(fits=True, text=f"fits now, {gib(left)} GiB to spare")


def _in_the_way(now: MemoryNow, gpu: Gpu) -> str:
    processes = now.state.gpus[gpu.uuid].processes
    if not processes:
        return "no process of it can be seen from here: end what holds it, or choose other GPUs with DIST_GPUS="
    return f"{_process(processes[0])} is in the way: end it, or choose other GPUs with DIST_GPUS="


def render_use(now: MemoryNow) -> Iterator[str]:
    """Memory in use: each GPU with its processes, and RAM."""
    yield from (f"note: {note}" for note in now.hardware.notes)
    for gpu in now.hardware.gpus:
        state = now.state.gpus[gpu.uuid]
        sizes = f"{gib(gpu.memory_bytes)} GiB: {gib(state.used_bytes)} in use, {gib(state.free_bytes)} free"
        yield f"GPU {gpu.index}   {gpu.name}, {sizes}"
        yield from (f"        {_process(one)}" for one in state.processes)
        unseen = state.used_bytes - sum(one.used_bytes or 0 for one in state.processes)
        if state.processes and unseen > GIB:
            yield f"        {gib(unseen)} GiB more: the driver, or processes that cannot be seen from here"
    total, free = now.hardware.ram_bytes, now.ram_free_bytes
    yield f"RAM     {gib(total)} GiB: {gib(max(0, total - free))} in use, {gib(free)} free"


def _process(one: GpuProcess) -> str:
    name = one.name or "name not visible from here"
    size = "an unknown amount" if one.used_bytes is None else f"{gib(one.used_bytes)} GiB"
    return f"pid {one.pid} ({name}), {size}"
