"""Everything that `make plan` shows, as one value: the choice, the run's length, what more GPUs give, warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sft_play.config.schema import TuningMode
from sft_play.errors import ConfigError
from sft_play.facts.hardware import GIB, Hardware, LinkKind, describe_hardware
from sft_play.plan.build import Plan, PlanInputs, choose, does_not_fit, evaluation_of, plan_of
from sft_play.plan.derive import settings_variants
from sft_play.plan.disk import estimate_run_bytes
from sft_play.plan.lengths import expected_longest, expected_longest_by_length, mean_length
from sft_play.plan.memory import estimate
from sft_play.plan.rate import scaled_learning_rate
from sft_play.plan.settings import Placement, Settings
from sft_play.plan.strategy import HEAP, BatchRequest, Candidate, Choice, choose_strategy

GPU_COUNTS = (1, 2, 4, 8)
# Rates that are usual at a global batch of 32: adapters (QLoRA paper, appendix B), full fine-tuning (Llama recipes).
USUAL_RATE = {TuningMode.QLORA: 2e-4, TuningMode.LORA: 2e-4, TuningMode.FULL: 2e-5}
USUAL_GLOBAL_BATCH = 32
# A rate is worth a warning from this factor on, either way.
RATE_FACTOR = 6.0
BETTER_BATCH = 1.1
# Real tokens in a micro-batch below which padding is worth a word, and what sorting rows has to bring it to.
MUCH_PADDING, BETTER_LENGTH = 0.6, 0.8
# Placements that exchange more than gradients in every step.
TALKATIVE = {Placement.FSDP, Placement.HSDP, Placement.ZERO3, Placement.TP}
# docs/plan_accuracy.md: the published runs are of one GPU and of FSDP's first version, not of the second.
VALIDATED = {Placement.SINGLE}


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Steps, tokens and hours of the whole run; None where the data is not prepared or speeds are unknown."""

    rows: int | None
    """Rows of an epoch, or packs."""
    steps: int | None
    tokens: int | None
    hours: float | None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What a number of the same GPUs would give; `speedup` is over one GPU, None where one does not fit."""

    gpus: int
    strategy: str
    tokens_per_second: float
    speedup: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The plan with all that speaks for and against it.

    Attributes:
        plan, chosen: None where nothing fits; `refusal` then says why and what would.
        validated: whether measured runs stand behind the chosen strategy's memory figure.
    """

    inputs: PlanInputs
    choice: Choice
    chosen: Candidate | None
    plan: Plan | None
    refusal: ConfigError | None
    length: RunLength
    scaling: tuple[Scaling, ...]
    warnings: tuple[str, ...]
    disk_bytes: int
    validated: bool


def make_report(inputs: PlanInputs) -> Report:
    """Plan a config and look around it.

    Raises:
        ConfigError: batch values that contradict each other, or something that the device lacks.
    """
    choice = choose(inputs)
    chosen = choice.chosen and _with_evaluation(inputs, choice.chosen)
    return Report(
        inputs=inputs,
        choice=choice,
        chosen=chosen,
        plan=plan_of(inputs, chosen) if chosen else None,
        refusal=None if chosen else does_not_fit(inputs, choice),
        length=run_length(inputs, chosen),
        scaling=scaling(inputs),
        warnings=tuple(warnings(inputs, chosen)),
        disk_bytes=estimate_run_bytes(inputs.config, inputs.facts),
        validated=bool(chosen and chosen.layout.placement in VALIDATED and inputs.hardware.gpus),
    )


def _with_evaluation(inputs: PlanInputs, chosen: Candidate) -> Candidate:
    """The candidate with what its evaluations take of memory."""
    return replace(chosen, memory=estimate(inputs.facts, evaluation_of(inputs, chosen).settings))


def run_length(inputs: PlanInputs, chosen: Candidate | None) -> RunLength:
    """Steps x rows x mean length; a step's time is that of rows padded to the longest of their micro-batch."""
    train = inputs.config.train
    split = inputs.data.splits["train"] if inputs.data else None
    rows = split.sequences if split else None
    if chosen is None:
        return RunLength(rows=rows, steps=None, tokens=None, hours=None)
    settings = chosen.settings
    steps = train.max_steps
    if steps is None and rows is not None:
        steps = math.ceil(math.ceil(rows / settings.global_batch) * train.epochs)
    if steps is None:
        return RunLength(rows=rows, steps=None, tokens=None, hours=None)
    mean = mean_length(split) if split else settings.seq_len
    speed = chosen.speed
    return RunLength(
        rows=rows,
        steps=steps,
        tokens=round(steps * settings.global_batch * mean),
        hours=steps * speed.step_seconds / 3600 if speed else None,
    )


def scaling(inputs: PlanInputs) -> tuple[Scaling, ...]:
    """The best strategy on 1, 2, 4 and 8 of these GPUs in one machine, at the run's own global batch."""
    if inputs.gpu is None:
        return ()
    found: list[Scaling] = []
    for count in GPU_COUNTS:
        machine = describe_hardware(inputs.gpu, count=count)
        best = _best_on(inputs, machine)
        rate = best.tokens_per_second if best else 0.0
        alone = found[0].tokens_per_second if found else rate
        found.append(
            Scaling(
                gpus=count,
                strategy=best.layout.name if best else "does not fit",
                tokens_per_second=rate,
                speedup=rate / alone if alone and rate else None,
            )
        )
    return tuple(found)


def _best_on(inputs: PlanInputs, machine: Hardware) -> Candidate | None:
    variants = settings_variants(inputs.config, inputs.gpu, inputs.data, inputs.facts.model_type)
    rows = inputs.data.splits["train"] if inputs.data else None
    request = BatchRequest(global_batch=inputs.config.train.global_batch_size, rows=rows)
    try:
        return choose_strategy(inputs.facts, variants, machine, request).chosen
    except ConfigError:  # the global batch does not divide by this number of GPUs
        return None


def warnings(inputs: PlanInputs, chosen: Candidate | None) -> Iterator[str]:
    """What deserves a second look, each with the key to change."""
    yield from inputs.hardware.notes
    if inputs.hardware.unequal:
        yield "the GPUs differ: every one is planned like the smallest; dist.gpus picks equal ones"
    if chosen is None:
        return
    if not inputs.hardware.gpus:
        yield from _cpu_warnings(inputs)
    settings = chosen.settings
    if chosen.memory.host_bytes and not inputs.hardware.ram_bytes:
        host = chosen.memory.host_bytes * max(1, len(inputs.hardware.gpus)) / GIB
        yield f"{host:.0f} GiB of host memory are needed on each machine; how much a described machine has is unknown"
    if chosen.memory.nvme_bytes:
        disk = chosen.memory.nvme_bytes * max(1, len(inputs.hardware.gpus)) / GIB
        yield f"{disk:.0f} GiB are needed in dist.nvme_path on each machine, at the speed of a PCIe 3.0 drive here"
    if settings.placement in TALKATIVE and inputs.hardware.link is LinkKind.PCIE:
        yield f"{chosen.layout.name} exchanges weights in every step and these GPUs have no NVLink"
    yield from _padding_warning(inputs, settings)
    yield from _rate_warning(inputs, settings)
    yield from _batch_warning(inputs, settings, chosen)


def _cpu_warnings(inputs: PlanInputs) -> Iterator[str]:
    yield f"the memory model is fitted to GPUs; a CPU needs {HEAP:g} times what it says, measured with 135M parameters"
    if not inputs.hardware.ram_bytes:
        yield "how much memory the described machine has is unknown: whether this fits is not judged"


def _padding_warning(inputs: PlanInputs, settings: Settings) -> Iterator[str]:
    """Where much of what is computed is padding, and rows of like length would do with much less."""
    if inputs.data is None or settings.packed or settings.by_length or settings.micro_batch < 2:
        return
    split = inputs.data.splits["train"]
    if split.streamed:
        return
    real, random = mean_length(split), expected_longest(split, settings.micro_batch)
    alike = expected_longest_by_length(split, settings.micro_batch, settings.global_batch)
    if real / random < MUCH_PADDING and alike < BETTER_LENGTH * random:
        yield (
            f"about {1 - real / random:.0%} of each micro-batch would be padding: DATA_PACKING=true takes it away, "
            f"TRAIN_GROUP_BY_LENGTH=true leaves about {1 - real / alike:.0%}"
        )


def _rate_warning(inputs: PlanInputs, settings: Settings) -> Iterator[str]:
    train, mode = inputs.config.train, inputs.config.tuning.mode
    usual = USUAL_RATE[mode] * math.sqrt(settings.global_batch / USUAL_GLOBAL_BATCH)
    rate = scaled_learning_rate(inputs.config, settings.global_batch)
    scaled = "" if train.lr_scaling == "none" else f" (scaled to {rate:.2g})"
    if not train.learning_rate:
        yield "train.learning_rate is 0: nothing will be learned"
    elif not 1 / RATE_FACTOR <= rate / usual <= RATE_FACTOR:
        side = "high" if rate > usual else "low"
        yield (
            f"train.learning_rate {train.learning_rate:g}{scaled} is {side} for {mode.value} at "
            f"{settings.global_batch} rows a step; about {usual:.0e} is usual"
        )


def _batch_warning(inputs: PlanInputs, settings: Settings, chosen: Candidate) -> Iterator[str]:
    """A power of two near by that is clearly faster."""
    total = settings.global_batch
    near = {2 ** math.floor(math.log2(total)), 2 ** math.ceil(math.log2(total))} - {total}
    for other in sorted(near):
        train = inputs.config.train.model_copy(
            update={"global_batch_size": other, "batch_size": "auto", "grad_accum": "auto"}
        )
        try:
            changed = replace(inputs, config=inputs.config.model_copy(update={"train": train}), only=[chosen.layout])
            best = choose(changed).chosen
        except ConfigError:
            continue
        if best and best.tokens_per_second > BETTER_BATCH * max(1.0, chosen.tokens_per_second):
            gain = best.tokens_per_second / chosen.tokens_per_second - 1
            yield f"train.global_batch_size {other} would be {gain:.0%} faster than {total}: it divides better"
