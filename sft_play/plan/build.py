"""The plan of a run: every automatic value decided from the figures, with the reason beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.data import DataFacts
from sft_play.facts.hardware import GIB, Gpu, Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.communication import why_no_device
from sft_play.plan.derive import batch_request, choose_optimizer, settings_variants
from sft_play.plan.evaluation import Evaluation, EvaluationInputs, Mode, decide_evaluation
from sft_play.plan.fast import (
    choose_attention,
    choose_kernels,
    choose_loss,
    refuse_storage,
    refuse_without_cuda,
)
from sft_play.plan.layouts import Layout, layouts, why_impossible
from sft_play.plan.memory import estimate
from sft_play.plan.nearest import nearest_fitting
from sft_play.plan.precision import name_of
from sft_play.plan.rate import scaled_learning_rate
from sft_play.plan.reasons import reasons
from sft_play.plan.settings import Checkpointing, Placement
from sft_play.plan.speed import estimate_speed
from sft_play.plan.strategy import Candidate, Choice, choose_strategy


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made from.

    Attributes:
        hardware: the GPUs that the run takes, and no others.
        data: None where the rows are not prepared; every row is then taken to be `model.max_seq_len` long.
        only: layouts to choose from; empty for all.
    """

    config: Config
    hardware: Hardware
    facts: ModelFacts
    data: DataFacts | None = None
    only: Sequence[Layout] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The smallest GPU; None on a machine without."""
        return min(self.hardware.gpus, key=lambda gpu: gpu.memory_bytes, default=None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run. The worker applies it as it stands and checks that it was applied.

    Attributes:
        world_size, nodes: processes of the run, and the machines that they are spread over evenly.
        sharding_factor: ranks that share one copy of the weights under `hsdp`, else None.
        backend: communication library, `nccl` or `gloo`.
        device: `cuda` or `cpu`; `device_uuids` name this machine's GPUs whatever CUDA_VISIBLE_DEVICES says.
        learning_rate: the peak, scaled with the global batch where `train.lr_scaling` says so.
        evaluation: what an evaluation gives: `loss`, or answers too, to all rows (`generate`) or to those that the
            budget allows (`sample`); `evaluation_reason` says why.
        eval_batch: rows of one evaluation batch on one GPU.
        predicted: allocated_bytes, device_bytes (at the longest rows); tokens_per_second (0 where unknown) and
            step_seconds (at rows as they are, where those are known); flops_per_token and peak_flops_per_second (of
            all GPUs), which MFU is made of, 0 where unknown.
        loss, kernels: how the loss holds its logits (`full`, `chunked`, `fused`), and the library of fused layers
            (`none`, `liger`, `hub`, `unsloth`).
        mfu_formula: what flops_per_token counts, in words; empty where unknown.
    """

    strategy: str
    offload: str
    world_size: int
    nodes: int
    sharding_factor: int | None
    backend: str
    device: str
    device_name: str
    device_uuids: tuple[str, ...]
    micro_batch: int
    grad_accum: int
    global_batch: int
    learning_rate: float
    seq_len: int
    dtype: str
    autocast: str
    attention: str
    optimizer: str
    gradient_checkpointing: bool
    pin_memory: bool
    evaluation: Mode = "none"
    evaluation_reason: str = ""
    eval_batch: int = 1
    mfu_formula: str = ""
    loss: str = "chunked"
    kernels: str = "none"
    predicted: dict[str, float]
    reasons: tuple[str, ...]


def choose(inputs: PlanInputs) -> Choice:
    """Every legal layout with its figures, and the one taken.

    Raises:
        ConfigError: batch values that contradict each other, a precision or kernel that the device lacks, or no
            layout of those to choose from can run.
    """
    config = inputs.config
    variants = settings_variants(config, inputs.gpu, inputs.data, inputs.facts.model_type)
    inputs = replace(inputs, only=able_here(inputs))
    refused = [why_impossible(inputs.facts, variants[0], inputs.hardware, layout) for layout in inputs.only]
    if inputs.only and all(refused):
        what = f"{inputs.only[0].name} {refused[0]}"
        raise ConfigError(what, where="dist.strategy", fix="use auto, or change dist.gpus")
    return choose_strategy(
        inputs.facts, variants, inputs.hardware, batch_request(config, inputs.data), only=inputs.only
    )


def able_here(inputs: PlanInputs) -> Sequence[Layout]:
    """The layouts to choose from that this machine can give what the keys of `dist` ask for; empty for all.

    Raises:
        ConfigError: it can under none of them.
    """
    wanted = inputs.only or layouts()
    refused = {
        layout: found for layout in wanted if (found := why_no_device(inputs.config, layout, inputs.hardware))[0]
    }
    if len(refused) == len(wanted):
        key, why = next(iter(refused.values()))
        raise ConfigError(why, where=key, fix=f"remove {key}")
    return [layout for layout in wanted if layout not in refused] if refused else inputs.only


def make_plan(inputs: PlanInputs, *, speed_at_longest: bool = False) -> Plan:
    """The plan that the figures choose.

    Args:
        speed_at_longest: predict the speed too at the longest rows, for a run that meets only those (calibration).

    Raises:
        ConfigError: nothing fits: with the figures of the best attempt, and the nearest setting that would fit.
    """
    choice = choose(inputs)
    if choice.chosen is None:
        raise does_not_fit(inputs, choice)
    chosen = choice.chosen
    if speed_at_longest:
        chosen = replace(chosen, speed=estimate_speed(inputs.facts, chosen.settings, inputs.hardware))
    return plan_of(inputs, chosen)


def plan_of(inputs: PlanInputs, candidate: Candidate) -> Plan:
    """A candidate as a plan.

    Raises:
        ConfigError: the best checkpoint is to be chosen by a figure that its evaluations cannot have; 4-bit values are
            stored in a type that this strategy cannot shard.
        EnvironmentProblem: the backend has no use for this machine.
    """
    config, gpu, settings = inputs.config, inputs.gpu, candidate.settings
    refuse_without_cuda(config, gpu)
    refuse_storage(config, settings)
    evaluation = evaluation_of(inputs, candidate)
    memory = estimate(inputs.facts, evaluation.settings)
    pin = config.train.dataloader_pin_memory
    speed = candidate.speed
    return Plan(
        strategy=candidate.layout.placement.value,
        offload=candidate.layout.offload.value,
        world_size=1 if candidate.layout.placement is Placement.LAYER_SPLIT else settings.gpus,
        nodes=inputs.hardware.nodes,
        sharding_factor=settings.sharding_factor,
        backend=choose_backend(config, gpu),
        device="cuda" if gpu else "cpu",
        device_name=name_of(gpu),
        device_uuids=tuple(one.uuid for one in inputs.hardware.gpus),
        micro_batch=settings.micro_batch,
        grad_accum=settings.grad_accum,
        global_batch=settings.global_batch,
        learning_rate=scaled_learning_rate(config, settings.global_batch),
        seq_len=settings.seq_len,
        dtype=settings.param_dtype.value,
        autocast=settings.compute_dtype.value,
        attention=choose_attention(config, gpu),
        optimizer=choose_optimizer(config, gpu),
        gradient_checkpointing=settings.checkpointing is not Checkpointing.NONE,
        pin_memory=gpu is not None if pin == "auto" else pin,
        evaluation=evaluation.mode,
        evaluation_reason=evaluation.reason,
        eval_batch=evaluation.batch,
        predicted={
            "allocated_bytes": memory.allocated_bytes,
            "device_bytes": memory.device_bytes,
            "tokens_per_second": round(speed.tokens_per_second, 1) if speed else 0.0,
            "step_seconds": round(speed.step_seconds, 4) if speed else 0.0,
            "flops_per_token": speed.model_flops_per_token if speed else 0.0,
            "peak_flops_per_second": settings.gpus * min(one.flops for one in inputs.hardware.gpus) if speed else 0.0,
        },
        loss=choose_loss(config, gpu)[0],
        kernels=choose_kernels(config, gpu, inputs.facts.model_type)[0],
        mfu_formula=speed.formula if speed else "",
        reasons=(*reasons(inputs, candidate), f"evaluation {evaluation.mode}: {evaluation.reason}"),
    )


def evaluation_of(inputs: PlanInputs, candidate: Candidate) -> Evaluation:
    """How a run of this candidate evaluates.

    Raises:
        ConfigError: as `plan_of`.
    """
    return decide_evaluation(
        EvaluationInputs(
            config=inputs.config,
            facts=inputs.facts,
            settings=candidate.settings,
            hardware=inputs.hardware,
            data=inputs.data,
            step_seconds=candidate.speed.step_seconds if candidate.speed else None,
        )
    )


def choose_backend(config: Config, gpu: Gpu | None) -> str:
    """Communication library: NCCL between GPUs unless the config says gloo; gloo between CPUs.

    Raises:
        ConfigError: NCCL is asked for where there is no GPU.
    """
    asked = config.dist.sync_backend
    if asked == "nccl" and gpu is None:
        raise ConfigError("NCCL needs GPUs and none is seen", where="dist.sync_backend", fix="leave it at auto")
    return ("nccl" if gpu else "gloo") if asked == "auto" else asked


def does_not_fit(inputs: PlanInputs, choice: Choice) -> ConfigError:
    """The error for a config that fits nowhere: the nearest miss with its figures, and what would fit."""
    if not choice.candidates:
        why = "; ".join(f"{name}: {reason}" for name, reason in choice.illegal.items())
        return ConfigError(f"no strategy is possible here ({why})", where="dist.strategy", fix="use strategy: auto")
    best = min(choice.candidates, key=lambda one: one.memory.needed_bytes)
    forced = f"strategy {best.layout.name} does not fit" if inputs.only else "no strategy fits"
    return ConfigError(
        f"{forced} {inputs.facts.name}: {best.reason}", where="the plan", fix=nearest_fitting(inputs, choose)
    )


def gib(number: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{number / GIB:.1f}"
