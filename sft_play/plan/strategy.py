"""`choose_strategy`: every legal way to lay a run over the GPUs, with its figures; the fastest that fits wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sft_play.facts.data import SplitFacts
from sft_play.facts.hardware import GIB, Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.batch import Batch, allowed_batches, choose_batch
from sft_play.plan.layouts import Layout, hybrid_shards, layouts, why_illegal, why_impossible
from sft_play.plan.lengths import speed_on_rows
from sft_play.plan.memory import Estimate, estimate
from sft_play.plan.settings import Dtype, Method, Offload, Placement, Settings
from sft_play.plan.speed import Speed

# Share of a GPU's memory that a plan leaves free: the memory model's error, and what else a desktop card shows.
HEADROOM = 0.05
# What a process takes on a CPU of what the model of memory says: the C library's heap keeps freed pieces, and the
# libraries have theirs. Of the demo on 2 cores, two runs: 1.3 and 1.4.
HEAP = 1.4
# Strategies nearer than this to the fastest are as fast as it; the simplest of them, first in ORDER, is taken.
TIE = 0.02
_DEEPSPEED = frozenset({Placement.ZERO1, Placement.ZERO2, Placement.ZERO3})


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One legal strategy with its figures.

    Attributes:
        batch: the split taken, or the smallest one where nothing fits.
        fits: within the smallest GPU's memory less the headroom, and within host memory where that is known.
        reason: why it lost, or why it won.
    """

    layout: Layout
    settings: Settings
    batch: Batch
    memory: Estimate
    speed: Speed | None
    fits: bool
    reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.speed.tokens_per_second if self.speed else 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All candidates, in the order of ORDER, and the one taken; None where nothing fits."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    illegal: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What the config fixes of the batch; None stands for `auto`.

    Attributes:
        rows: the rows that fill it, for speed; None where they are unknown: all are then `seq_len` long.
    """

    micro_batch: int | None = None
    grad_accum: int | None = None
    global_batch: int | None = None
    rows: SplitFacts | None = None


def choose_strategy(
    facts: ModelFacts,
    variants: Sequence[Settings],
    hardware: Hardware,
    request: BatchRequest,
    *,
    only: Sequence[Layout] = (),
) -> Choice:
    """The fastest strategy that fits, and why each other lost.

    Args:
        variants: the run's settings, at least one, such as without and with checkpointing; each layout takes the
            one that suits it. Placement, batch and offload are replaced.
        only: layouts to consider, legal or not where none of them is; all legal ones by default.

    Raises:
        ConfigError: the fixed batch values contradict each other under every layout.
    """
    base = variants[0]
    # What the config names runs wherever it can; what is merely offered must also be worth it.
    refusal = why_impossible if len(only) == 1 else why_illegal
    illegal = {layout.name: why for layout in layouts() if (why := refusal(facts, base, hardware, layout))}
    wanted = [layout for layout in only or layouts() if layout.name not in illegal] or only
    found = tuple(
        _better([evaluate_layout(facts, one, hardware, request, layout) for one in variants]) for layout in wanted
    )
    chosen = _fastest([one for one in found if one.fits])
    return Choice(
        candidates=tuple(replace(one, reason=_reason(one, chosen, hardware)) for one in found),
        chosen=replace(chosen, reason=_reason(chosen, chosen, hardware)) if chosen else None,
        illegal=illegal,
    )


def _better(candidates: Sequence[Candidate]) -> Candidate:
    """The variant that fits and is fastest; where none fits, the one that needs least. The first wins a tie."""
    fitting = [one for one in candidates if one.fits]
    if fitting:
        return max(fitting, key=lambda one: one.tokens_per_second)
    return min(candidates, key=lambda one: one.memory.needed_bytes)


def settings_for(base: Settings, hardware: Hardware, layout: Layout, batch: Batch | None = None) -> Settings:
    """The run's settings under one layout.

    DeepSpeed trains 16-bit weights with an fp32 master copy where the others keep fp32 weights.
    """
    changes: dict[str, object] = {
        "placement": layout.placement,
        "offload": layout.offload,
        "gpus": hardware.world_size,
        "nvme": base.nvme and layout.placement is Placement.ZERO3 and layout.offload is not Offload.NONE,
        "sharding_factor": hybrid_shards(hardware, layout) if layout.placement is Placement.HSDP else None,
    }
    if batch:
        changes |= {"micro_batch": batch.micro_batch, "grad_accum": batch.grad_accum}
    if layout.placement in _DEEPSPEED and base.method is Method.FULL and base.compute_dtype is not Dtype.FP32:
        changes |= {"param_dtype": base.compute_dtype, "master_weights": base.param_dtype is Dtype.FP32}
    return replace(base, **changes)  # type: ignore[arg-type]


def evaluate_layout(
    facts: ModelFacts, base: Settings, hardware: Hardware, request: BatchRequest, layout: Layout
) -> Candidate:
    """Figures of one layout at the batch split that suits it best."""
    plain = settings_for(base, hardware, layout)
    options = allowed_batches(
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
        global_batch=request.global_batch,
        data_parallel=plain.data_parallel,
    )

    def fits(batch: Batch) -> bool:
        return fits_memory(estimate(facts, settings_for(base, hardware, layout, batch)), hardware)

    def speed(batch: Batch) -> float:
        found = speed_on_rows(facts, settings_for(base, hardware, layout, batch), hardware, request.rows)
        return found.tokens_per_second if found else 0.0

    taken = choose_batch(options, fits=fits, speed=speed)
    batch = taken or min(options, key=lambda one: one.micro_batch)
    settings = settings_for(base, hardware, layout, batch)
    return Candidate(
        layout=layout,
        settings=settings,
        batch=batch,
        memory=estimate(facts, settings),
        speed=speed_on_rows(facts, settings, hardware, request.rows),
        fits=taken is not None,
    )


def fits_memory(memory: Estimate, hardware: Hardware) -> bool:
    """Whether a run fits the smallest GPU with headroom, and its offloaded part the machine's RAM where known."""
    if hardware.gpus and memory.needed_bytes > (1 - HEADROOM) * hardware.smallest_gpu_bytes:
        return False
    if not hardware.gpus and hardware.ram_bytes:
        return memory.allocated_bytes * HEAP * hardware.cpu_processes <= (1 - HEADROOM) * hardware.ram_bytes
    host = memory.host_bytes * max(1, len(hardware.gpus))
    return not hardware.ram_bytes or host <= (1 - HEADROOM) * hardware.ram_bytes


def _fastest(fitting: Sequence[Candidate]) -> Candidate | None:
    """The simplest of all that are within TIE of the best, whatever order they come in.

    Every candidate is compared with the best one and with no other, so that ties need not be transitive.
    """
    # Offloading and splitting layers are for what fits in no other way: the one hangs on a host that the plan knows
    # little of, the other leaves all GPUs but one idle. Between the two the figures decide.
    fitting = [one for one in fitting if _stands_alone(one.layout)] or list(fitting)
    if not fitting:
        return None
    best = max(one.tokens_per_second for one in fitting)
    near = [one for one in fitting if one.tokens_per_second >= best * (1 - TIE)]
    simplest = {layout: place for place, layout in enumerate(layouts())}
    return min(near, key=lambda one: simplest.get(one.layout, len(simplest)))


def _stands_alone(layout: Layout) -> bool:
    """Everything stays on the GPUs, and all of them work."""
    return layout.offload is Offload.NONE and layout.placement is not Placement.LAYER_SPLIT


def _reason(one: Candidate, chosen: Candidate | None, hardware: Hardware) -> str:
    if not one.fits:
        return _why_not(one, hardware)
    if chosen is None or one.layout == chosen.layout:
        return f"the fastest that fits with {HEADROOM:.0%} to spare"
    if not chosen.tokens_per_second:
        return f"fits too; {chosen.layout.name} is simpler"
    if one.layout.offload is not Offload.NONE and chosen.layout.offload is Offload.NONE:
        return f"not needed: {chosen.layout.name} fits on the GPUs"
    slower = 1 - one.tokens_per_second / chosen.tokens_per_second
    if slower <= TIE:
        return f"as fast as {chosen.layout.name}, which is simpler"
    return f"fits, {slower:.0%} slower than {chosen.layout.name}"


def _why_not(one: Candidate, hardware: Hardware) -> str:
    needed, capacity = one.memory.needed_bytes / GIB, hardware.smallest_gpu_bytes / GIB
    rows = f"micro-batch {one.batch.micro_batch}"
    if hardware.gpus and needed > (1 - HEADROOM) * capacity:
        return f"needs {needed:.1f} GiB a GPU at {rows} ({one.memory.peak_phase.value}); {capacity:.1f} are there"
    if not hardware.gpus:
        used = one.memory.allocated_bytes * HEAP * hardware.cpu_processes / GIB
        return f"needs {used:.1f} GiB of memory at {rows}; the machine has {hardware.ram_bytes / GIB:.1f}"
    host = one.memory.host_bytes * max(1, len(hardware.gpus)) / GIB
    return f"needs {host:.0f} GiB of host memory; the machine has {hardware.ram_bytes / GIB:.0f}"
