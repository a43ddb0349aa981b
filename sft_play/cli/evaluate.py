"""`make eval`: loss, perplexity, token accuracy and answers of a finished run, or of a model on other rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.eval_rows import Rows, config_of_model, rows_of_data, rows_of_run
from sft_play.cli.eval_text import table
from sft_play.cli.options import Options, positive
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentProblem, ModelError, UsageError
from sft_play.facts.locate import locate_model
from sft_play.facts.probe import probe_hardware

# Options that mean something only where answers are generated.
OF_ANSWERS = ("max-new-tokens", "num-beams", "rouge-tokenizer")
DEFAULT_BATCH = 8
Figures = dict[str, dict[str, float]]
"""`tuned`, and `base` beside it under --compare, each with its metrics; of a model alone `model`."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line names.

    Attributes:
        job: of RUN; None for MODEL.
        run: RUN's folder.
    """

    config: Config
    target: Any
    job: Any
    run: Path | None
    batch: int


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Evaluate RUN, or MODEL with an optional ADAPTER, on rows or on TASKS.

    Raises:
        UsageError: what is named contradicts itself.
        ModelError, DataError: a folder or rows are unusable.
        EnvironmentProblem: a package that TASKS needs is missing, or memory ran out.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["eval"])
    given = {name: environ.get(name) or None for name in ("RUN", "MODEL", "ADAPTER", "DATA", "SPLIT", "TASKS")}
    refuse_contradictions(given)
    if given["TASKS"]:
        from sft_play.cli.lm_eval import require_package

        require_package()
    if not probe_hardware(environment=environ).gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # see launch/spec.py

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    asked = find(given, options)
    if options.compare and asked.target.adapter is None and asked.target.base is None:
        raise UsageError(
            "--compare needs what the model was before, and this is one model", where="ARGS", fix="use RUN"
        )
    if given["TASKS"]:
        from sft_play.cli.lm_eval import evaluate_tasks

        found = evaluate_tasks(asked.target, given["TASKS"], options, asked.batch)
        report(asked, "tasks", {"tasks": given["TASKS"]}, found, options)
        return 0
    if given["DATA"]:
        rows = rows_of_data(asked.config, given["DATA"], asked.target.folder, say)
    else:
        rows = rows_of_run(asked.job, given["SPLIT"], say)
    evaluated, figures, predictions = evaluate(asked, rows, options)
    for name, lines in predictions.items():
        keep(asked, f"{rows.name}{'' if name != 'base' else '-base'}.jsonl", lines)
    split = None if given["DATA"] else rows.name
    about = {"data": given["DATA"], "split": split, "rows": evaluated, "note": note_of(asked, predictions)}
    report(asked, rows.name, about, figures, options)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make eval", description=__doc__)
    result.add_argument("--compare", action="store_true", help="beside what the model was before its training")
    answers = result.add_mutually_exclusive_group()
    answers.add_argument("--generate", action="store_true", help="answers and their scores too, whatever the run says")
    answers.add_argument("--loss-only", action="store_true", help="no answers, whatever the run says")
    result.add_argument("--max-rows", type=positive, help="rows at most; of TASKS, questions a task")
    result.add_argument("--batch-size", type=positive, help="rows at once; by default as the run's plan, or 8")
    result.add_argument(
        "--max-new-tokens", type=positive, help="longest answer; by default as the run's config, or 128"
    )
    result.add_argument("--num-beams", type=positive, help="beams of the search for answers")
    words = "words that ROUGE counts: rouge-score's own (a-z, 0-9), or those of every script"
    result.add_argument("--rouge-tokenizer", choices=("rouge_score", "unicode"), help=words)
    result.add_argument("--shots", type=int, help="TASKS: solved examples before each question")
    result.add_argument("--chat", action="store_true", help="TASKS: ask through the chat template")
    result.add_argument("--json", action="store_true", help="one JSON object, as docs/evaluation.md describes it")
    return result


def refuse_contradictions(given: Mapping[str, str | None]) -> None:
    """Inputs that exclude or need each other.

    Raises:
        UsageError: naming them.
    """
    run, model = given["RUN"], given["MODEL"]
    forms = "make eval RUN=runs/NAME [SPLIT=test], or MODEL=folder [ADAPTER=folder] DATA=file"
    if bool(run) == bool(model):
        raise UsageError("name either RUN or MODEL", fix=forms)
    if given["ADAPTER"] and not model:
        raise UsageError("ADAPTER goes with MODEL; a run has its own", where="ADAPTER", fix=forms)
    if model and not (given["DATA"] or given["TASKS"]):
        raise UsageError("MODEL needs DATA or TASKS: it has no rows of its own", where="MODEL", fix=forms)
    chosen = [name for name in ("DATA", "SPLIT", "TASKS") if given[name]]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", where=chosen[0], fix="keep one of them")
    if given["SPLIT"] and not run:
        raise UsageError("SPLIT is of a run's rows", where="SPLIT", fix="use DATA with MODEL")


def find(given: Mapping[str, str | None], options: argparse.Namespace) -> Asked:
    """The run or the model, its config and the batch.

    Raises:
        ModelError: it is not there.
    """
    run = Path(given["RUN"]) if given["RUN"] else None
    if run and not (run / "run.json").is_file():
        raise ModelError("there is no run.json", where=str(run), fix="ls runs shows the runs")
    located = None if run else locate_model(str(given["MODEL"]), None).path
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)  # of the stack, for whoever upgrades it
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from sft_play.runtime.job import read_job
    from sft_play.runtime.standalone import Target, target_of_run

    if run:
        job = read_job(run / "run.json")
        batch = options.batch_size or job.plan.eval_batch
        return Asked(config=with_options(job.config, options), target=target_of_run(job), job=job, run=run, batch=batch)
    assert located is not None
    adapter = Path(given["ADAPTER"]) if given["ADAPTER"] else None
    config = config_of_model(str(given["MODEL"]), located, given["DATA"] or "none")
    target = Target(model=located, adapter=adapter)
    batch = options.batch_size or DEFAULT_BATCH
    return Asked(config=with_options(config, options), target=target, job=None, run=None, batch=batch)


def with_options(config: Config, options: argparse.Namespace) -> Config:
    """The config with what ARGS says of answers.

    Raises:
        UsageError: it says something of them, and there will be none.
    """
    changes: dict[str, Any] = {"predict_with_generate": config.train.predict_with_generate}
    if options.generate or options.loss_only:
        changes["predict_with_generate"] = options.generate
    idle = [name for name in OF_ANSWERS if getattr(options, name.replace("-", "_"))]
    if idle and not changes["predict_with_generate"]:
        what = f"--{idle[0]} is about answers, and this evaluation gives none"
        raise UsageError(what, where="ARGS", fix="--generate gives them, or leave it out")
    if options.max_new_tokens:
        changes["generation_max_new_tokens"] = options.max_new_tokens
    if options.num_beams:
        changes["generation_num_beams"] = options.num_beams
    if options.rouge_tokenizer:
        changes["eval_rouge_tokenizer"] = options.rouge_tokenizer
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def evaluate(
    asked: Asked, rows: Rows, options: argparse.Namespace
) -> tuple[int, Figures, dict[str, tuple[dict[str, Any], ...]]]:
    """Rows evaluated, figures and predictions, of the model and under --compare of what it was."""
    from datasets import Dataset, disable_progress_bars

    from sft_play.runtime.evaluate import EvalSettings, evaluate_rows
    from sft_play.runtime.standalone import answers_of, load_base, load_target, without_adapter

    disable_progress_bars()
    data = Dataset.from_file(str(rows.file))
    if options.max_rows and options.max_rows < len(data):
        data = data.select(range(options.max_rows))
    model, tokenizer = load_target(asked.target)
    answers = asked.config.train.predict_with_generate
    settings = EvalSettings(
        batch=asked.batch,
        autocast=asked.target.autocast,
        generation=answers_of(asked.config, model, tokenizer, asked.target) if answers else None,
        sources=rows.sources,
    )
    name = "tuned" if asked.target.adapter or asked.target.base else "model"
    found = {}
    with memory_said(asked.batch):
        if options.compare and asked.target.base is None:
            with without_adapter(model):
                found["base"] = evaluate_rows(model, tokenizer, data, settings)
        found[name] = evaluate_rows(model, tokenizer, data, settings)
        if options.compare and asked.target.base is not None:
            del model
            found = {"base": evaluate_rows(load_base(asked.target), tokenizer, data, settings), **found}
    figures = {one: dict(result.metrics) for one, result in found.items()}
    return len(data), figures, {one: result.predictions for one, result in found.items() if result.predictions}


@contextmanager
def memory_said(batch: int) -> Iterator[None]:
    """Out of memory, as a line with its cure.

    Raises:
        EnvironmentProblem: memory ran out.
    """
    from sft_play.runtime.answers import GenerationOutOfMemory, is_out_of_memory

    try:
        yield
    except Exception as error:
        if not (isinstance(error, GenerationOutOfMemory) or is_out_of_memory(error)):
            raise
        fix = f"ARGS=--batch-size={max(1, batch // 2)}" if batch > 1 else "a GPU with more memory"
        raise EnvironmentProblem(f"memory ran out at {batch} rows at once", where="evaluation", fix=fix) from error


def note_of(asked: Asked, predictions: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """What the scores of the answers leave out, which is also said; None where nothing."""
    from sft_play.runtime.words import unseen_note

    answers = next(iter(predictions.values()), ())
    note = unseen_note([one["reference"] for one in answers], asked.config.train.eval_rouge_tokenizer)
    if note:
        print(f"warning: {note} -> ARGS='--rouge-tokenizer unicode' counts words of every script", file=sys.stderr)
    return note or None


def keep(asked: Asked, name: str, lines: Sequence[Any]) -> None:
    """Write JSON lines into the run's folder; a model alone has none."""
    if asked.run:
        (asked.run / "eval").mkdir(exist_ok=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (asked.run / "eval" / name).write_text(text, encoding="utf-8")


def report(asked: Asked, name: str, about: Mapping[str, Any], figures: Figures, options: argparse.Namespace) -> None:
    """Print the figures, and keep them in the run's folder."""
    target = asked.target
    whole = {
        "version": 1,
        "run": str(asked.run) if asked.run else None,
        "model": str(target.model),
        "adapter": str(target.adapter) if target.adapter else None,
        **{key: value for key, value in about.items() if value is not None},
        "figures": figures,
    }
    keep(asked, f"{name}.json", [whole])
    if options.json:
        print(json.dumps(whole, ensure_ascii=False), flush=True)
        return
    rows = f", {about['rows']:,} rows" if "rows" in about else ""
    print(f"{asked.run or target.adapter or target.model}: {about.get('data') or name}{rows}")
    for line in table(figures):
        print(line)
    if asked.run:
        print(f"kept in {asked.run / 'eval' / name}.json", flush=True)
