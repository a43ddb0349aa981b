"""The worker: one process of a run, from run.json to the finished adapter or model."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerState, set_seed

from sft_play.config.schema import TuningMode
from sft_play.config.secrets import redacted
from sft_play.errors import (
    AppliedDiffersError,
    ExitCode,
    RankFailedError,
    exit_code_of,
)
from sft_play.plan.build import Plan
from sft_play.record.amendments import LossesOnly, read_amendments
from sft_play.record.checkpoints import rotate, step_of
from sft_play.record.live import ASKED
from sft_play.record.run_record import write_exit, write_record
from sft_play.runtime.adapters import add_adapter
from sft_play.runtime.applied import AppliedCallback, check_applied
from sft_play.runtime.arguments import build_arguments
from sft_play.runtime.callbacks import StopCallback, build_callbacks
from sft_play.runtime.compiling import compile_layers
from sft_play.runtime.dist import Ranks, present_group, process_group, read_ranks
from sft_play.runtime.fallback import LossesOnlyCallback
from sft_play.runtime.figures import callback_of, evaluate_at_end, figures, final_metrics, train_loss
from sft_play.runtime.fused import use_fp8
from sft_play.runtime.gather import scatter_weights
from sft_play.runtime.job import Job, read_job
from sft_play.runtime.model import load_model, load_tokenizer
from sft_play.runtime.output import LastingStream
from sft_play.runtime.packing import PackingCallback
from sft_play.runtime.save import load_best, save_result
from sft_play.runtime.sensors import resident_bytes
from sft_play.runtime.status import show_loading
from sft_play.runtime.symptoms import as_user_error
from sft_play.runtime.trainer import SftPlayTrainer, build_trainer
from sft_play.runtime.unsloth import load_unsloth
from sft_play.runtime.watching import WatchCallback

PR_SET_PDEATHSIG = 1


def train(job: Job, stop: StopCallback, ranks: Ranks) -> dict[str, Any]:
    """Load, train, evaluate, save; returns what the record keeps."""
    started, resident = time.monotonic(), resident_bytes()
    config, plan = job.config, job.plan
    set_seed(config.train.seed)
    print(f"loading {config.model.name} as {plan.dtype} on {devices(plan)}")
    trainer, tokenizer = assemble(job, stop, ranks)
    watch = callback_of(trainer, WatchCallback)
    watch.started = started  # GPUs are held while the model loads
    counts, applied = equip(trainer, job)
    print(f"training {counts['trainable_parameters']:,} of {counts['parameters']:,} parameters")

    if job.resume_from is None or not finish_from(trainer, job.resume_from):
        trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)
        trainer.settling.wait()
        if trainer.state.global_step < trainer.state.max_steps:
            stop.raise_if_asked(trainer.state.global_step)
    best_step = load_best(trainer, job) if config.train.load_best_model_at_end else None
    evaluations = evaluate_at_end(trainer)
    if speed := trainer.evaluation.speed():
        print(speed)
    result = save_result(trainer, job, tokenizer)
    watch.sensors.close()
    return {
        "outcome": "done",
        "result": result.name,
        "train_loss": train_loss(trainer),
        "steps": trainer.state.global_step,
        "best_step": best_step,
        **figures(trainer, job, resident),
        **counts,
        "applied": applied.counts,
        **evaluations,
        "evaluation": {**trainer.evaluation.summary(), "metrics": final_metrics(trainer)},
    }


def assemble(job: Job, stop: StopCallback, ranks: Ranks) -> tuple[SftPlayTrainer, Any]:
    """The trainer with its model, rows and callbacks, and the tokenizer."""
    config, plan = job.config, job.plan
    arguments = build_arguments(config, plan, job.run, has_validation="validation" in job.splits)
    present_group(plan)
    model = build_model(job, ranks)
    tokenizer = load_tokenizer(
        job.model_path, config.model.chat_template, trust_remote_code=config.model.trust_remote_code
    )
    callbacks = build_callbacks(config, plan, job.run, stop, ranks, first_step=1 + step_of(job.resume_from))
    return build_trainer(job, arguments, model, tokenizer, callbacks, ranks), tokenizer


def build_model(job: Job, ranks: Ranks) -> Any:
    """The model as it is trained: loaded, with its adapter, in fp8 and compiled where that is asked for."""
    config, plan = job.config, job.plan
    model: Any
    if config.tuning.backend == "unsloth":
        model = load_unsloth(config, plan, job.model_path, job.run.launch, ranks)
    else:
        model = load_model(config, plan, job.model_path, ranks)
        if config.tuning.mode is not TuningMode.FULL:
            model = add_adapter(model, config)
    if config.train.fp8:
        use_fp8(model)
    if config.train.torch_compile:
        compile_layers(model)
    return model


def equip(trainer: SftPlayTrainer, job: Job) -> tuple[dict[str, int], AppliedCallback]:
    """Check what is applied, and add the callbacks that need the trainer.

    Returns:
        Counts of weights, and the callback that checks the wrapped model.

    Raises:
        AppliedDiffersError: something else was planned.
    """
    counts = check_applied(trainer, job.config, job.plan)
    applied = AppliedCallback(trainer, job.config, job.plan)
    trainer.add_callback(applied)
    if job.config.data.packing:
        trainer.add_callback(PackingCallback(trainer, job))
    for amendment in read_amendments(job.run):
        if isinstance(amendment, LossesOnly):
            trainer.add_callback(LossesOnlyCallback(trainer.evaluation.fall_back, amendment.reason))
    if trainer.evaluation.missing or trainer.evaluation.refused:
        print(f"note: {'; '.join(filter(None, (trainer.evaluation.missing, trainer.evaluation.refused)))}")
    return counts, applied


def finish_from(trainer: SftPlayTrainer, checkpoint: Path) -> bool:
    """Load a checkpoint after which nothing is left to train; False where training goes on from it.

    The Trainer looks at its step budget only after a step, so it would train one too many.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    stopping: Any = state.stateful_callbacks.get("EarlyStoppingCallback") or {}
    patience = stopping.get("args", {}).get("early_stopping_patience")
    waited = stopping.get("attributes", {}).get("early_stopping_patience_counter", 0)
    stopped_early = patience is not None and waited >= patience
    if state.global_step < state.max_steps and not stopped_early:
        return False
    trainer.state = state
    trainer._load_callback_state()
    scatter_weights(trainer.accelerator.unwrap_model(trainer.model), checkpoint)
    if trainer.accelerator.is_main_process:  # what was killed after its last save may not have rotated
        rotate(trainer.run, trainer.save_limit, checkpoint, state.best_global_step)
    print(f"training ended at step {state.global_step}; finishing from its checkpoint")
    return True


def devices(plan: Plan) -> str:
    """The device, and how many of them under which strategy."""
    if plan.strategy == "single":
        return plan.device_name
    return f"{max(plan.world_size, len(plan.device_uuids))} x {plan.device_name} ({plan.strategy})"


def check_device(job: Job) -> None:
    """The plan's device must be one that this torch can use.

    Raises:
        AppliedDiffersError: a GPU was planned and torch sees none.
    """
    if job.plan.device == "cuda" and not torch.cuda.is_available():
        unsloth = job.config.tuning.backend == "unsloth"
        build = f"install the CUDA build (make {'install-unsloth' if unsloth else 'install'} TORCH_INDEX=...)"
        raise AppliedDiffersError(
            f"{job.plan.device_name} was planned and torch {torch.__version__} sees no GPU",
            fix=build if unsloth else f"{build}, or train on the CPU with CUDA_VISIBLE_DEVICES=",
        )


def parent_lives() -> bool:
    """Whether the process that started the run is still there: it may have died while this one was importing."""
    parent = int(os.environ.get("SFT_PLAY_PARENT", 0))
    if not parent:
        return True
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main(run_json: Path) -> int:
    """Run the job and leave its outcome in exit.json and record.json."""
    # If the parent is killed, this process saves and leaves instead of training on unseen (Linux only).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if not parent_lives():
        return int(ExitCode.RANK_FAILED)
    # Deprecations of the stack are for whoever upgrades it, not for the user of a run.
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    job, rank = read_job(run_json), read_ranks().rank
    speaking = sys.stdout if rank == 0 else job.run.rank_log(rank).open("a", encoding="utf-8", buffering=1)
    sys.stdout = sys.stderr = LastingStream(speaking, job.run.log)
    if rank:
        os.environ.pop(ASKED, None)  # the live line is rank 0's
    show_loading()
    stop = StopCallback()
    # The parent blocks both until here, so that one which comes while the stack is imported is not lost.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        check_device(job)
        with process_group(job) as ranks:
            record = train(job, stop, ranks)
    except BaseException as error:
        known = as_user_error(error, job.run, job.plan, rank)
        if known is None:
            with contextlib.suppress(OSError), job.run.log.open("a", encoding="utf-8") as log:
                log.write(redacted(traceback.format_exc()))
            place = f"rank {rank}" if job.plan.world_size > 1 else "worker"
            known = RankFailedError(f"{type(error).__name__}: {error}", where=place, fix=f"see {job.run.log}")
        with contextlib.suppress(OSError):  # on a full disk the code still reaches the parent by itself
            if rank == 0:
                write_record(job.run, {"outcome": type(known).__name__, "error": known.lines(), "stamp": job.stamp})
            write_exit(job.run.launch, exit_code_of(known), known.lines(), rank, kind=type(known).__name__)
        if job.plan.world_size > 1:
            os._exit(exit_code_of(known))  # the others wait inside a collective; tearing down the group would wait too
        return exit_code_of(known)
    if rank == 0:
        write_record(job.run, {**record, "stamp": job.stamp})
    write_exit(job.run.launch, 0, [], rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
