"""`make serve`: an OpenAI-compatible endpoint of a run or a model on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from sft_play.cli.infer import load
from sft_play.cli.inputs import run_folder
from sft_play.cli.options import Options
from sft_play.cli.run_start import say
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.errors import EnvironmentProblem, ExitCode, ModelError, UsageError
from sft_play.facts.locate import locate_model
from sft_play.facts.probe import probe_hardware
from sft_play.launch.processes import tie_to_parent
from sft_play.launch.tied import tied
from sft_play.record.told import read_model_path
from sft_play.report.read import read_object

HOST, PORT = "127.0.0.1", 8000
LOOPBACK = ("127.0.0.1", "localhost")
PACKAGES = ("fastapi", "uvicorn", "openai")
# What --max-lora-rank takes (vllm/config/lora.py, MaxLoRARanks; 1 is new there).
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
INSTALL = ".venv/bin/pip install -c constraints.txt -c constraints-serve.txt fastapi uvicorn openai"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve RUN, or MODEL with an optional ADAPTER.

    Raises:
        UsageError: no model named, or PORT is no port.
        ModelError: a folder is unusable.
        EnvironmentProblem: the server is not installed, or the port is taken.
    """
    options = parser().parse_args(argv)
    check_inputs(environ, INPUTS_OF["serve"])
    port = port_of(environ)
    engine = options.engine if options.engine != "auto" else fastest(environ)
    check_engine(engine)
    found, name = named(environ)
    if "MAKELEVEL" in environ:  # whatever ends make ends the server
        tie_to_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.host not in LOOPBACK:
        print(f"warning: {options.host}: other machines can use this endpoint, and it asks for no key", file=sys.stderr)
    listening = held_port(options.host, port)
    address = f"http://{options.host}:{listening.getsockname()[1]}/v1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # all that is served is on this disk
    if engine == "vllm":
        port = listening.getsockname()[1]  # PORT=0 has become a number
        listening.close()
        say(f"vLLM serves {name} on {address}; Ctrl-C ends it")
        return until_ended(vllm_words(found, name, options.host, port))
    speaker = load(found)
    from sft_play.runtime.serve import serve

    listening.listen()  # whoever reads the line below may ask at once
    say(f"serving {name} on {address} (OpenAI-compatible); Ctrl-C ends it")
    try:
        serve(speaker, name, listening, local=options.host in LOOPBACK)
    except KeyboardInterrupt:
        say("ended")
        sys.stdout.flush()
        os._exit(ExitCode.DONE)  # an answer at work is in a thread that Python's own end would wait for or trip over
    return ExitCode.DONE


def parser() -> argparse.ArgumentParser:
    """The options that ARGS may hold."""
    result = Options(prog="make serve", description=__doc__)
    result.add_argument(
        "--engine", choices=("auto", "transformers", "vllm"), default="auto", help="auto: vLLM where it and a GPU are"
    )
    result.add_argument("--host", default=HOST, help="another address than %(default)s lets other machines in")
    return result


def port_of(environ: Mapping[str, str]) -> int:
    """The port to listen on; 0 for any free one.

    Raises:
        UsageError: PORT is no port.
    """
    text = environ.get("PORT") or str(PORT)
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UsageError(f"{text!r} is no port", where="PORT", fix="a number from 1 to 65535")
    return int(text)


def fastest(environ: Mapping[str, str]) -> str:
    """The engine for `auto`."""
    return "vllm" if find_spec("vllm") and probe_hardware(environment=environ).gpus else "transformers"


def check_engine(engine: str) -> None:
    """Refuse an engine that is not installed.

    Raises:
        EnvironmentProblem: naming the packages and how to install them.
    """
    missing = [name for name in (("vllm",) if engine == "vllm" else PACKAGES) if find_spec(name) is None]
    if missing:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        fix = "ARGS='--engine transformers', or run make from vLLM's own environment" if engine == "vllm" else INSTALL
        raise EnvironmentProblem(what, where="make serve", fix=fix)


def named(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment with RUN as a path, and what requests call the model: the folder's name.

    Raises:
        UsageError: neither RUN nor MODEL is given, or both, or there is no such run.
    """
    run, model = environ.get("RUN"), environ.get("MODEL")
    if bool(run) == bool(model):
        fix = "make serve RUN=runs/NAME, or MODEL=folder [ADAPTER=folder]"
        raise UsageError("name either RUN or MODEL", fix=fix)
    if run:
        folder = run_folder(run, "RUN", environ)
        return {**environ, "RUN": str(folder)}, folder.resolve().name
    adapter = environ.get("ADAPTER")
    path = Path(adapter or str(model))
    return dict(environ), path.resolve().name if path.is_dir() else str(model)


def held_port(host: str, port: int) -> socket.socket:
    """A socket that has the port before the model is loaded.

    Raises:
        EnvironmentProblem: it is taken, or the address is none of this machine's.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        what = f"port {port} of {host} cannot be had ({str(error.strerror).lower()})"
        raise EnvironmentProblem(what, where="PORT", fix=f"PORT={port + 1} takes another") from error
    return listening


def vllm_words(environ: Mapping[str, str], name: str, host: str, port: int) -> tuple[str, ...]:
    """The command line of vLLM: base and adapter as they lie, with the template and the end tokens beside them.

    Raises:
        ModelError: the run has no result.
    """
    base, tuned = parts_of(environ)
    words: tuple[str, ...] = (
        "serve",
        str(base),
        "--host",
        host,
        "--port",
        str(port),
        "--tokenizer",
        str(tuned or base),
    )
    template = (tuned or base) / "chat_template.jinja"
    words += ("--chat-template", str(template)) if template.is_file() else ()
    if tuned is None:
        words += ("--served-model-name", name)
    else:
        words += ("--enable-lora", "--lora-modules", f"{name}={tuned}", "--max-lora-rank", str(room_for_rank(tuned)))
        words += ("--generation-config", str(tuned))
    return (sys.executable, "-m", "vllm.entrypoints.cli.main", *words)


def room_for_rank(adapter: Path) -> int:
    """The smallest rank that vLLM makes room for and the adapter fits in; its own rank beyond all of them."""
    settings = read_object(adapter / "adapter_config.json")
    rank = max(int(settings.get("r", 16)), *map(int, (settings.get("rank_pattern") or {}).values()), 1)
    return next((room for room in VLLM_RANKS if room >= rank), rank)


def parts_of(environ: Mapping[str, str]) -> tuple[Path, Path | None]:
    """Base and adapter, or a whole model and None.

    Raises:
        ModelError: the run has no result.
    """
    if not environ.get("RUN"):
        adapter = environ.get("ADAPTER")
        return locate_model(environ["MODEL"], None).path, Path(adapter) if adapter else None
    run = Path(environ["RUN"])
    if (run / "adapter").is_dir():
        return read_model_path(run / "run.json"), run / "adapter"
    if (run / "model").is_dir():
        return run / "model", None
    raise ModelError("the run has no result yet", where=str(run), fix="finish it with make train")


def until_ended(words: Sequence[str]) -> int:
    """Run a server that ends with this process.

    Raises:
        EnvironmentProblem: it ended by itself.
    """
    server = subprocess.Popen(tied(signal.SIGTERM, *words), stdin=subprocess.DEVNULL)
    try:
        code = server.wait()
    except KeyboardInterrupt:
        server.terminate()
        server.wait()
        return ExitCode.DONE
    raise EnvironmentProblem(f"the server ended with {code}", where="vllm", fix="its lines above say why")
