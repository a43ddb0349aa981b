"""`make merge`: the adapter of a run put into its base, and checked against base and adapter."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cli.inputs import run_folder
from sft_play.cli.options import Options, positive, share
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import ModelError, SftPlayError, UsageError
from sft_play.facts.locate import locate_model
from sft_play.record.manifest import folder_problem
from sft_play.record.results import refuse_output, refuse_overlap
from sft_play.report.card import model_card
from sft_play.report.read import read_run

FORMS = "make merge RUN=runs/NAME, or MODEL=folder ADAPTER=folder ARGS='--output folder'"
# Of each row; the logits of a long one would be large.
TOKENS = 128
SENTENCES = (
    "The assistant answers in a few words.",
    "Water boils at 100 degrees Celsius, 212 degrees Fahrenheit.",
    "def add(first, second):\n    return first + second",
    "How do I open a file in Python, and what does it cost?",
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A base and its adapter.

    Attributes:
        job: of RUN; None for MODEL.
    """

    base: Path
    adapter: Path
    run: Path | None
    job: Any

    @property
    def trust_remote_code(self) -> bool:
        return bool(self.job and self.job.config.model.trust_remote_code)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Merge RUN, or MODEL and ADAPTER.

    Raises:
        UsageError: what is named contradicts itself.
        ModelError: base or adapter cannot be merged.
        DiskFullError, ResultDiffersError: as `runtime/merge.py`.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["merge"])
    if options.output is not None:
        refuse_output(options.output, force=options.force)
    parts = find_parts(environ, options.output)
    merge_parts(parts, options.output or (parts.run or Path()) / "model", options)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make merge", description=__doc__)
    result.add_argument("--dtype", choices=("bf16", "fp32"), help="of the result; by default as the base's files")
    result.add_argument("--output", type=Path, help="its folder; by default model/ in the run's")
    result.add_argument("--rows", type=positive, default=4, help="rows that the check compares on")
    result.add_argument("--bound", type=share, help="largest difference, as a share of the largest logit")
    result.add_argument("--data", help="file of rows to compare on, in place of the run's own")
    result.add_argument("--force", action="store_true", help="replace another result of this program too")
    return result


def find_parts(environ: Mapping[str, str], output: Path | None) -> Parts:
    """The folders that are named.

    Raises:
        UsageError: RUN and MODEL, or neither; MODEL without ADAPTER or a place for the result.
        ModelError: the run trained a whole model, or has no result.
    """
    run, model, adapter = (environ.get(name) or None for name in ("RUN", "MODEL", "ADAPTER"))
    if bool(run) == bool(model) or bool(model) != bool(adapter):
        raise UsageError("name either RUN, or MODEL and ADAPTER", fix=FORMS)
    if run:
        return parts_of_run(run_folder(run, "RUN", environ))
    if output is None:
        raise UsageError("--output is missing: without a run there is no folder for the result", fix=FORMS)
    quiet()
    return Parts(base=locate_model(str(model), None).path, adapter=Path(str(adapter)), run=None, job=None)


def parts_of_run(folder: Path) -> Parts:
    """Base and adapter of a run.

    Raises:
        ModelError: it trained a whole model, has no result yet or a damaged one, or its base is gone.
    """
    if not (folder / "run.json").is_file():
        raise ModelError("there is no run.json", where=str(folder), fix="make runs lists the runs")
    if not (folder / "adapter").is_dir():
        if (folder / "model").is_dir():
            fix = f"use {folder / 'model'} as it is, or make export"
            raise ModelError("the run trained the whole model: there is no adapter", where=str(folder), fix=fix)
        raise ModelError("the run has no result yet", where=str(folder), fix="finish it with make train")
    refuse_damaged(folder / "adapter")
    quiet()
    from sft_play.runtime.job import read_job

    job = read_job(folder / "run.json")
    if not job.model_path.is_dir():
        fix = "name it with MODEL= and ADAPTER="
        raise ModelError("the run's base model is not there any more", where=str(job.model_path), fix=fix)
    return Parts(base=job.model_path, adapter=folder / "adapter", run=folder, job=job)


def refuse_damaged(result: Path) -> None:
    """Raises: ModelError: a file of a run's result is not what the run has written."""
    if problem := folder_problem(result):
        fix = "take a good copy of it; MODEL= in place of RUN= takes folders as they are"
        raise ModelError(f"the result is not whole: {problem}", where=str(result), fix=fix)


def quiet() -> None:
    """Keep the stack's deprecations and progress bars to itself; they are for whoever upgrades it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # see launch/spec.py
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def merge_parts(parts: Parts, output: Path, options: argparse.Namespace) -> None:
    """Merge, check and say what came out."""
    refuse_output(output, force=options.force)
    refuse_overlap(output, parts.base, parts.adapter)
    from sft_play.runtime.merge import MergeOrder, merge, refuse_base
    from sft_play.runtime.merge_check import BOUNDS, Comparison, compare

    refuse_base(parts.base)
    dtype = options.dtype or dtype_of(parts.base)
    comparison = Comparison(
        base=parts.base,
        adapter=parts.adapter,
        rows=rows_of(parts, options),
        dtype=dtype,
        bound=BOUNDS[dtype] if options.bound is None else options.bound,
        trust_remote_code=parts.trust_remote_code,
        quantization=quantization_of(parts),
    )
    order = MergeOrder(
        base=parts.base,
        adapter=parts.adapter,
        output=output,
        dtype=options.dtype,
        trust_remote_code=parts.trust_remote_code,
        stamp=parts.job.stamp if parts.job else {},
    )

    def check(folder: Path) -> dict[str, Any]:
        print(f"merged; checking {len(comparison.rows)} rows against base and adapter in {dtype}", flush=True)
        return compare(comparison, folder)

    def card(folder: Path, figures: Mapping[str, Any]) -> None:
        if parts.run is not None:
            text = model_card(read_run(parts.run), kind="model", check=figures)
            (folder / "README.md").write_text(text, encoding="utf-8")

    print(f"merging {parts.adapter} into {parts.base}", flush=True)
    found = merge(order, check, card)
    say(found, output)


def quantization_of(parts: Parts) -> dict[str, Any] | None:
    """How the base's weights were kept while the adapter was trained, where that was in 4 bits."""
    from sft_play.runtime.model import quantization

    settings = quantization(parts.job.config, parts.job.plan) if parts.job else None
    return None if settings is None else dict(settings.to_dict())


def dtype_of(base: Path) -> str:
    """The type of most of the base's weights."""
    from sft_play.runtime.model import DTYPES
    from sft_play.runtime.shard_files import base_tensors, piece_of

    counts: dict[Any, int] = {}
    for name, file in base_tensors(base).items():
        piece = piece_of(name, file)
        counts[piece.dtype] = counts.get(piece.dtype, 0) + piece.size_bytes
    most = max(counts, key=lambda one: counts[one])
    return next((name for name, one in DTYPES.items() if one == most), "fp32")


def rows_of(parts: Parts, options: argparse.Namespace) -> list[list[int]]:
    """Token ids to compare on: the run's rows, those of --data, or sentences where there are none."""
    from datasets import Dataset, disable_progress_bars

    from sft_play.cli.eval_rows import config_of_model, rows_of_data, rows_of_run

    disable_progress_bars()

    def silent(text: str) -> None:
        """Preparing says more than fits here."""

    try:
        if options.data:
            config = parts.job.config if parts.job else config_of_model(str(parts.base), parts.base, options.data)
            rows = rows_of_data(config, options.data, parts.adapter, silent)
        elif parts.job:
            held_out = any(name in parts.job.splits for name in ("validation", "test"))
            rows = rows_of_run(parts.job, None if held_out else "train", silent)
        else:
            return sentences(parts.adapter, parts.base, options.rows)
    except SftPlayError as error:
        if options.data:
            raise
        print(f"note: the run's rows are not to be had ({error.what}); built-in sentences are compared on")
        return sentences(parts.adapter, parts.base, options.rows)
    data = Dataset.from_file(str(rows.file))
    return [list(data[number]["input_ids"][:TOKENS]) for number in range(min(options.rows, len(data)))]


def sentences(adapter: Path, base: Path, count: int) -> list[list[int]]:
    """Token ids of built-in sentences."""
    from sft_play.data.template import load_text_tokenizer

    folder = adapter if (adapter / "tokenizer.json").is_file() else base
    tokenizer = load_text_tokenizer(folder).tokenizer
    return [list(tokenizer.encode(sentence).ids[:TOKENS]) for sentence in SENTENCES[:count]]


def say(found: Mapping[str, Any], output: Path) -> None:
    """The figures of the check, and where the result is."""
    print(
        f"logits on {found['rows']} rows, {found['positions']} positions: largest difference {found['largest']:.3g},"
        f" mean {found['mean']:.3g}, likeliest token the same at {found['top1_agreement']:.1%}"
    )
    share = found["largest"] / max(1.0, found["largest_logit"])
    print(
        f"the largest is {share:.2g} of the largest logit ({found['largest_logit']:.1f}), bound {found['bound']:g};"
        f" the adapter itself moves logits by {found['mean_effect_of_adapter']:.3g} in the mean"
    )
    if "mean_of_4_bits" in found:
        print(
            f"trained over 4-bit weights and merged into the full ones: logits over 4 bits differ by"
            f" {found['mean_of_4_bits']:.3g} in the mean, the likeliest token is the same at"
            f" {found['agreement_of_4_bits']:.1%}; that is the rounding of the base, and not part of the check"
        )
    if "no_4_bits" in found:
        print("trained over 4-bit weights, which could not be computed with here: how far they differ is not known")
    print(f"the model is in {output}", flush=True)
