"""`make infer`: one prompt, a file of prompts, or a chat that streams."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.cli.options import Options, positive
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import DataError, ModelError, UsageError
from sft_play.facts.locate import locate_model
from sft_play.facts.probe import probe_hardware

QUIT_WORDS = ("/quit", "/exit")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Answer from RUN, or from MODEL with an optional ADAPTER.

    Raises:
        UsageError: no model named, or the options contradict each other.
        ModelError, DataError: a folder or a prompt file is unusable.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["infer"])
    if options.prompt is not None and options.file:
        raise UsageError("--prompt and --file exclude each other", where="ARGS")
    chats = read_prompts(options)
    speaker = load(environ)
    if options.compare and not speaker.has_adapter:
        raise UsageError("--compare needs an adapter to switch off, and this is a whole model", where="ARGS")
    from sft_play.runtime.generate import Sampling

    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p)
    if options.seed is not None:
        import torch

        torch.manual_seed(options.seed)
    if chats is None:
        return chat(speaker, sampling, options.system)
    for messages in chats:
        show(speaker, messages, sampling, options)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make infer", description=__doc__)
    result.add_argument("--prompt", help="one question")
    result.add_argument("--file", type=Path, help="a text file, one prompt a line, or JSONL with prompt or messages")
    result.add_argument("--system", help="system message put before every prompt")
    result.add_argument("--compare", action="store_true", help="answer without the adapter too")
    result.add_argument("--max-new-tokens", type=positive, default=256)
    result.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    result.add_argument("--top-p", type=float, default=1.0)
    result.add_argument("--seed", type=int, help="seed of sampling")
    result.add_argument("--json", action="store_true", help="one JSON object an answer")
    return result


def load(environ: Mapping[str, str]) -> Any:
    """The model that RUN, or MODEL and ADAPTER, name."""
    run, model, adapter = (environ.get(name) or None for name in ("RUN", "MODEL", "ADAPTER"))
    if bool(run) == bool(model):
        raise UsageError("name either RUN or MODEL", fix="make infer RUN=runs/NAME, or MODEL=folder [ADAPTER=folder]")
    run_json = Path(run) / "run.json" if run else None
    if run_json and not run_json.is_file():
        raise ModelError("there is no run.json", where=str(run), fix="ls runs shows the runs")
    located = None if run else locate_model(str(model), None)
    if not probe_hardware(environment=environ).gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # see launch/spec.py
    import warnings

    import transformers

    # Deprecations of the stack are for whoever upgrades it, not for whoever asks a question.
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from sft_play.runtime.generate import load_speaker
    from sft_play.runtime.job import read_job
    from sft_play.runtime.model import DTYPES, quantization

    if run_json is None:
        assert located is not None
        return load_speaker(located.path, Path(adapter) if adapter else None)
    job = read_job(run_json)
    if not job.model_path.is_dir():
        raise ModelError("the run's base model is not there any more", where=str(job.model_path))
    dtype = DTYPES[job.plan.dtype]
    if job.run.adapter.is_dir():
        return load_speaker(
            job.model_path,
            job.run.adapter,
            dtype=dtype,
            quantization=quantization(job.config, job.plan),
            trust_remote_code=job.config.model.trust_remote_code,
        )
    if job.run.model.is_dir():
        return load_speaker(job.run.model, None, dtype=dtype, trust_remote_code=job.config.model.trust_remote_code)
    raise ModelError("the run has no result yet", where=str(run), fix="finish it with make train")


def read_prompts(options: argparse.Namespace) -> list[list[dict[str, str]]] | None:
    """The chats to answer; None for an interactive chat.

    Raises:
        DataError: the file is missing, empty, or a line of it is no prompt.
    """
    system = [{"role": "system", "content": options.system}] if options.system else []
    if options.prompt is not None:
        if not options.prompt.strip():
            raise UsageError("the prompt is empty", where="--prompt")
        return [[*system, {"role": "user", "content": options.prompt}]]
    if options.file is None:
        return None
    try:
        lines = options.file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({error})", where=str(options.file)) from error
    chats = [[*system, *_messages(line, f"{options.file}:{n}")] for n, line in enumerate(lines, 1) if line.strip()]
    if not chats:
        raise DataError("holds no prompt", where=str(options.file), fix="one prompt a line")
    return chats


def _messages(line: str, where: str) -> list[Any]:
    if not line.lstrip().startswith("{"):
        return [{"role": "user", "content": line}]
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", where=where) from error
    if isinstance(row.get("messages"), list) and row["messages"]:
        turns: list[Any] = row["messages"]
        return turns[:-1] if turns[-1].get("role") == "assistant" else turns
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    raise DataError("has neither prompt nor messages", where=where)


def show(speaker: Any, messages: list[dict[str, str]], sampling: Any, options: argparse.Namespace) -> None:
    """Print one question and its answer, or both answers under `--compare`."""
    answers = {"base": speaker.answer(messages, sampling, base=True)} if options.compare else {}
    answers["answer"] = speaker.answer(messages, sampling)
    if options.json:
        print(json.dumps({"messages": messages, **answers}, ensure_ascii=False), flush=True)
        return
    if options.prompt is None or options.compare:
        print(f"\n{messages[-1]['content']}")
    labels = {"base": "  before: ", "answer": "  after:  "} if options.compare else {"answer": ""}
    for key, label in labels.items():
        print(f"{label}{answers[key]}", flush=True)


def chat(speaker: Any, sampling: Any, system: str | None) -> int:
    """A conversation with memory, until an empty input, /quit or the end of the input."""
    history = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        print("chat: /quit or Ctrl-D ends it, /new forgets what was said")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line in QUIT_WORDS:
            return 0
        if line == "/new":
            history = history[: 1 if system else 0]
            continue
        if not line:
            continue
        history.append({"role": "user", "content": line})
        pieces = []
        for piece in speaker.stream(history, sampling):
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
        history.append({"role": "assistant", "content": "".join(pieces).strip()})
