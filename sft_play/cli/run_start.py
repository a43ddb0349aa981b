"""What is decided about a run's folder before it starts: refused, shelved, gone on with, or begun."""

from __future__ import annotations

import shutil
from ctypes.util import find_library
from hashlib import sha256
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config, TrainSection
from sft_play.errors import ConfigError, DiskFullError, EnvironmentProblem, ResumeRefusedError
from sft_play.facts.backends import unsloth_folder, unsloth_installed
from sft_play.facts.data import DataFacts
from sft_play.facts.hardware import Hardware
from sft_play.facts.locate import ModelFolder
from sft_play.facts.shapes import ModelFacts
from sft_play.plan.build import Plan
from sft_play.plan.disk import estimate_run_bytes
from sft_play.plan.fast import refuse_without_cuda
from sft_play.record.checkpoints import newest_first, newest_good, step_of, sweep
from sft_play.record.manifest import read_manifest, stamp_of
from sft_play.record.run_dir import RunDir
from sft_play.record.run_record import read_record, trim_metrics
from sft_play.record.stamp import Identities


def refuse_finished(run: RunDir, config: Config) -> None:
    """A finished run is never trained again unasked.

    Raises:
        ResumeRefusedError: it is finished and `run.resume` is not `never`.
    """
    if config.run.resume == "never":
        return
    record = read_record(run) or {}
    if record.get("outcome") == "done":
        if config.dist.node_rank == 0:
            sweep(run)  # whoever was killed after the result was there left half files
        losses = (record.get(name) for name in ("eval_loss", "train_loss"))
        loss = next((f"loss {one:.4f}, " for one in losses if one is not None), "")
        raise ResumeRefusedError(
            f"this run is finished ({loss}{record.get('result') or 'result'}/)",
            where=str(run.path),
            fix="RUN_RESUME=never trains it anew; a changed setting starts another run",
        )


def refuse_other_backend(run: RunDir, config: Config) -> None:
    """Told before what this machine lacks for the backend: no machine lets one go on with the other's checkpoint.

    Raises:
        ResumeRefusedError: the newest checkpoint was made by the other backend.
    """
    if config.run.resume == "never":
        return
    for folder in newest_first(run)[:1]:
        try:
            made = stamp_of(read_manifest(folder)).get("backend")
        except (OSError, ValueError, AttributeError):  # damaged: what looks at all of it says so
            return
        if made not in (None, config.tuning.backend):
            raise ResumeRefusedError(
                f"checkpoint {folder.name} is of another run: backend",
                where=str(run.path),
                table=[("", "made by", "this run"), ("backend", str(made), config.tuning.backend)],
            )


def check_backend(config: Config, hardware: Hardware) -> None:
    """What `tuning.backend: unsloth` needs here: a CUDA GPU, and its environment.

    Raises:
        EnvironmentProblem: it lacks one of them.
    """
    if config.tuning.backend != "unsloth":
        return
    refuse_without_cuda(config, hardware.gpus[0] if hardware.gpus else None)
    if not unsloth_installed():
        what = f"unsloth's environment is not installed ({unsloth_folder().name})"
        raise EnvironmentProblem(what, where="tuning.backend", fix="make install-unsloth")


def identities_of(config: Config, model: ModelFolder, data_fingerprint: str) -> Identities:
    """What the stamp says of base, tokenizer, template and data."""
    from sft_play.data.template import read_template_source

    template = read_template_source(model.path, config.model.chat_template)
    tokenizer = model.path / "tokenizer.json"
    return Identities(
        base=model.identity(),
        tokenizer=sha256(tokenizer.read_bytes()).hexdigest()[:16] if tokenizer.is_file() else "",
        template=sha256(template[0].encode()).hexdigest()[:16] if template else "",
        data=data_fingerprint,
    )


def where_to_start(
    run: RunDir,
    config: Config,
    stamp: dict[str, Any],
    *,
    trust: bool = False,
    force: bool = False,
    again: bool = False,
) -> Path | None:
    """The checkpoint to go on from; None for a fresh start. Machine 0 alone moves and trims files.

    Args:
        trust: load a checkpoint that its engine unpickles whoever wrote it.
        force: go on although settings or data differ; the stamp says so then.
        again: the run lost a process and goes on by itself, whatever `run.resume` said of its start.

    Raises:
        ResumeRefusedError: no checkpoint is good, they are of another run, or `must` resume and there is none.
    """
    main = config.dist.node_rank == 0
    if main:
        sweep(run)
    if config.run.resume == "never" and not again:
        if main and (newest_first(run) or any(file.is_file() for file in (run.record, run.metrics, run.amendments))):
            shelve(run)
        return None
    folder = newest_good(run, stamp, say, trust=trust, force=force)
    if main:
        trim_metrics(run.metrics, step_of(folder))
    if folder is None and config.run.resume == "must":
        raise ResumeRefusedError("run.resume is must and there is no checkpoint", where=str(run.path))
    if folder:
        say(f"resuming from {folder}")
    return folder


def shelve(run: RunDir) -> None:
    """Move the earlier attempt aside under `.../earlier-N`: starting anew loses nothing."""
    number = 1 + len(list(run.path.glob("earlier-*")))
    shelf = run.path / f"earlier-{number}"
    shelf.mkdir()
    for entry in (
        "checkpoints",
        "tb",
        "eval",
        "adapter",
        "model",
        "metrics.jsonl",
        "amendments.json",
        "record.json",
        "run.json",
        "run.log",
    ):
        if (run.path / entry).exists():
            shutil.move(run.path / entry, shelf / entry)
    run.create()
    say(f"the earlier attempt lies in {shelf}")
    if (shelf / run.amendments.name).is_file():
        say("what it had to change of its plan is not taken over: this start begins with the plan as it is")


def check_disk(run: RunDir, config: Config, facts: ModelFacts) -> None:
    """Refuse a run whose checkpoints cannot fit.

    Raises:
        DiskFullError: with the bytes needed and free.
    """
    needed, free = estimate_run_bytes(config, facts), shutil.disk_usage(run.path).free
    if needed > free:
        gib = 2**30
        raise DiskFullError(f"about {needed / gib:.1f} GiB are needed and {free / gib:.1f} free", where=str(run.path))


def check_rows(config: Config, facts: ModelFacts, data: DataFacts, plan: Plan) -> None:
    """What only the prepared rows show: positions that the model lacks, too few rows.

    Raises:
        ConfigError: naming the key.
    """
    check_positions(facts, data)
    rows = data.splits["train"].sequences
    together = plan.global_batch // plan.grad_accum
    if config.train.dataloader_drop_last and rows < together:
        raise ConfigError(
            f"{rows} {'packs' if config.data.packing else 'rows'} are fewer than one batch of {together}",
            where="train.dataloader_drop_last",
            fix="set it to false, or lower train.batch_size",
        )


def check_positions(facts: ModelFacts, data: DataFacts) -> None:
    """Refuse rows with more tokens than the model has positions.

    Raises:
        ConfigError: naming the key.
    """
    longest = max(split.longest for split in data.splits.values())
    if facts.max_positions and longest > facts.max_positions:
        raise ConfigError(
            f"a row has {longest} tokens and the model {facts.max_positions} positions",
            where="model.max_seq_len",
            fix=f"MODEL_MAX_SEQ_LEN={facts.max_positions} cuts longer rows",
        )


def check_nvme(config: Config, plan: Plan) -> None:
    """What DeepSpeed's offload to a disk needs, before anything is loaded.

    Raises:
        ConfigError: `dist.nvme_path` is no folder.
        EnvironmentProblem: the library for asynchronous reads is not installed.
    """
    if not config.dist.nvme_path or plan.offload == "none":
        return
    if not Path(config.dist.nvme_path).is_dir():
        raise ConfigError(f"no folder {config.dist.nvme_path}", where="dist.nvme_path", fix="name one on a fast disk")
    if find_library("aio") is None:
        raise EnvironmentProblem(
            "libaio is not installed", where="dist.nvme_path", fix="install libaio-dev (libaio-devel)"
        )


def refuse_ignored(config: Config, plan: Plan) -> None:
    """A setting of DDP under another strategy would do nothing; DeepSpeed steps before it tells the norm.

    Raises:
        ConfigError: naming the key and the strategy that the plan took.
    """
    defaults = TrainSection()
    keys = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
    set_keys = [key for key in keys if getattr(config.train, key) != getattr(defaults, key)]
    if set_keys and plan.strategy != "ddp":
        raise ConfigError(
            f"it has no effect under {plan.strategy}",
            where=f"train.{set_keys[0]}",
            fix="remove it, or DIST_STRATEGY=ddp",
        )
    if config.train.on_spike == "skip" and plan.strategy.startswith("zero"):
        raise ConfigError(
            f"{plan.strategy} cannot skip a step: DeepSpeed takes it before the norm is known",
            where="train.on_spike",
            fix="set it to warn, or DIST_STRATEGY=fsdp",
        )


def say(text: str) -> None:
    print(text, flush=True)
