"""`make export`: a run's result as a folder that transformers, vLLM and others load, or as a GGUF file."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.cli.inputs import run_folder
from sft_play.cli.merge import merge_parts, parts_of_run, quiet, refuse_damaged
from sft_play.cli.merge import parser as merge_parser
from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import ModelError, UsageError
from sft_play.facts.locate import locate_model
from sft_play.record.results import is_merged_from, is_ours, refuse_overlap
from sft_play.record.staging import staged

FORMATS = ("safetensors", "gguf")
# The first bytes of such a file.
GGUF = b"GGUF"
FORMS = "make export RUN=runs/NAME FORMAT=safetensors, or MODEL=folder FORMAT=gguf ARGS='--output file.gguf'"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A whole model.

    Attributes:
        run: the folder of its run; None for MODEL.
    """

    folder: Path
    run: Path | None
    title: str
    trust_remote_code: bool


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Export RUN, merging its adapter first, or MODEL.

    Raises:
        UsageError: what is named contradicts itself.
        ModelError, DataError: the model cannot be written so.
        DiskFullError, ResultDiffersError: the result does not fit, or is not what was written.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["export"])
    form = environ.get("FORMAT") or FORMATS[0]
    if form not in FORMATS:
        raise UsageError(f"no format {form!r}", where="FORMAT", fix=f"use {' or '.join(FORMATS)}")
    if form != "gguf" and (options.type or options.ollama):
        raise UsageError("--type and --ollama go with FORMAT=gguf", where="ARGS")
    if environ.get("MODEL") and options.output is None:
        raise UsageError("--output is missing: without a run there is no folder for the result", fix=FORMS)
    if options.output is not None:
        refuse_existing(options.output, form, options)
    finished = find_finished(environ)
    if form == "gguf":
        export_gguf(finished, options)
    else:
        export_folder(finished, options)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make export", description=__doc__)
    result.add_argument(
        "--type", choices=("f16", "q8_0", "bf16", "f32"), help="of a GGUF file's numbers; f16 unless named"
    )
    result.add_argument("--output", type=Path, help="where; by default in the run's folder")
    result.add_argument("--ollama", action="store_true", help="an Ollama Modelfile beside the GGUF file")
    result.add_argument("--force", action="store_true", help="replace what is at --output")
    return result


def find_finished(environ: Mapping[str, str]) -> Finished:
    """The whole model of RUN or MODEL.

    Raises:
        UsageError: both are named, or neither.
        ModelError: MODEL is an adapter, or the run has no result.
    """
    run, model = (environ.get(name) or None for name in ("RUN", "MODEL"))
    if bool(run) == bool(model):
        raise UsageError("name either RUN or MODEL", fix=FORMS)
    if model:
        if (Path(model) / "adapter_config.json").is_file():
            fix = "make merge MODEL=base ADAPTER=... first, then export what it writes"
            raise ModelError("this is an adapter, not a model", where=model, fix=fix)
        quiet()
        return Finished(
            folder=locate_model(model, None).path, run=None, title=Path(model).name, trust_remote_code=False
        )
    folder = run_folder(str(run), "RUN", environ)
    if (folder / "model").is_dir() and not (folder / "adapter").is_dir():
        refuse_damaged(folder / "model")
        quiet()
        return Finished(folder=folder / "model", run=folder, title=folder.resolve().name, trust_remote_code=False)
    parts = parts_of_run(folder)
    if not is_merged_from(folder / "model", parts.adapter / "adapter_model.safetensors"):
        print("the run's adapter is merged first", flush=True)
        merge_parts(parts, folder / "model", merge_parser().parse_args([]))
    else:
        refuse_damaged(folder / "model")
    return Finished(
        folder=folder / "model",
        run=folder,
        title=folder.resolve().name,
        trust_remote_code=parts.trust_remote_code,
    )


def export_folder(finished: Finished, options: argparse.Namespace) -> None:
    """Leave the model where it is, or copy it to --output; then load it in a fresh process.

    Raises:
        ModelError: something is at --output.
        DiskFullError, ResultDiffersError: see `main`.
    """
    from sft_play.runtime.export_check import load_elsewhere
    from sft_play.runtime.merge import check_disk

    target = finished.folder
    if options.output is None:
        found = load_elsewhere(target, trust_remote_code=finished.trust_remote_code)
    else:
        target = options.output
        refuse_overlap(target, finished.folder)
        with staged(target) as copy:
            size = sum(file.stat().st_size for file in finished.folder.rglob("*") if file.is_file())
            check_disk(copy.parent, size)
            shutil.copytree(finished.folder, copy)
            found = load_elsewhere(copy, trust_remote_code=finished.trust_remote_code)
            shutil.rmtree(target, ignore_errors=True)
            copy.rename(target)
    print(
        f"loaded by transformers in a fresh process: {found['parameters']:,} parameters in {found['dtype']};"
        f" it answers {found['answer']!r}"
    )
    print(f"the model is in {target}: transformers, vLLM and others load that folder", flush=True)


def export_gguf(finished: Finished, options: argparse.Namespace) -> None:
    """Write one file, read it back, and say how it compares.

    Raises:
        ModelError, DataError: it cannot be written so.
        DiskFullError, ResultDiffersError: see `main`.
    """
    from sft_play.data.ollama import modelfile
    from sft_play.data.template import load_text_tokenizer
    from sft_play.runtime.gguf_file import check_gguf, size_of_gguf, write_gguf
    from sft_play.runtime.merge import check_disk

    kind = options.type or "f16"
    own = (finished.run or Path()) / "gguf" / f"{finished.title}-{kind}.gguf"
    target: Path = options.output or own
    text = modelfile(load_text_tokenizer(finished.folder), target.name) if options.ollama else None
    card = target.parent / "Modelfile"
    if text is not None and options.output is not None and card.exists() and not options.force:
        raise ModelError("something is there already", where=str(card), fix="choose another folder, or --force")
    size = size_of_gguf(finished.folder, kind)
    print(f"writing {target}, then comparing it with {finished.folder}", flush=True)
    with staged(target) as staging:
        check_disk(staging.parent, size)
        write_gguf(finished.folder, staging, kind, finished.title)
        found = check_gguf(finished.folder, staging)
        staging.rename(target)
    types = ", ".join(f"{count} {name}" for name, count in found["types"].items())
    print(
        f"read back: {found['tensors']} tensors ({types}), each as its type has it, {found['largest']:.2g} off at most"
    )
    print(f"the file is {target}, {target.stat().st_size / 2**20:,.0f} MiB", flush=True)
    if text is not None:
        card.write_text(text, encoding="utf-8")
        print(f"ollama create {finished.title} -f {card}", flush=True)


def refuse_existing(place: Path, form: str, options: argparse.Namespace) -> None:
    """Raises: ModelError: something is there, and --force is not given or it is nothing that this program writes."""
    if not place.exists():
        return
    if not (is_gguf(place) if form == "gguf" else is_ours(place)):
        kind = "folder" if place.is_dir() else "file"
        raise ModelError(f"a {kind} is there that this program did not write", where=str(place), fix="choose another")
    if not options.force:
        raise ModelError("something is there already", where=str(place), fix="choose another place, or --force")


def is_gguf(place: Path) -> bool:
    """Whether a file begins as such a file does."""
    if not place.is_file():
        return False
    with place.open("rb") as stream:
        return stream.read(len(GGUF)) == GGUF
