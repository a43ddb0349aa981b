"""`make setup-accelerate`: write down what this machine has, for accelerate and for the config; INTERACTIVE=1 asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sft_play.cli.options import Options
from sft_play.config.inputs import INPUTS_OF, check_inputs
from sft_play.config.setup_file import SETUP_FILE
from sft_play.errors import EnvironmentProblem, UsageError
from sft_play.facts.hardware import Hardware
from sft_play.facts.probe import probe_hardware

FORM = """\
# What `make setup-accelerate` found on this machine{asked}. accelerate can read it (--config_file {path}), and it
# is the lowest layer of every config: `make config` shows what comes from here. The precision counts for every
# command; GPUs and machines for make train-distributed and make train-deepspeed, while make train takes one GPU.
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
use_cpu: {cpu}
num_processes: {processes}  # dist.gpus: {found}, of all machines together
mixed_precision: {precision}  # train.bf16 or train.fp16
num_machines: {nodes}  # dist.num_nodes
machine_rank: {rank}  # dist.node_rank
{meeting}"""
MEETING = """\
main_process_ip: {address}  # dist.main_address
main_process_port: {port}  # dist.main_port
same_network: true
"""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the file will say. `processes` are those of one machine."""

    processes: int
    cpu: bool
    precision: str
    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    port: int = 29500
    found: str = ""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Detect, ask where asked to, write and show.

    Raises:
        UsageError: INTERACTIVE is neither 0 nor 1, or there is no terminal to ask on.
        EnvironmentProblem: the file cannot be written.
    """
    Options(prog="make setup-accelerate", description=__doc__).parse_args(list(argv))
    check_inputs(environ, INPUTS_OF["setup-accelerate"])
    asks = wants_questions(environ)
    answers = detect(probe_hardware(environment=environ))
    if asks:
        answers = ask(answers, input)
    write(render(answers, asked=asks))
    print(f"wrote {SETUP_FILE}\n")
    print(SETUP_FILE.read_text(encoding="utf-8"), end="")
    print("\nmake config shows what it sets; a config file or a variable is stronger; removing it undoes it")
    return 0


def wants_questions(environ: Mapping[str, str]) -> bool:
    """Whether INTERACTIVE=1 asks for questions.

    Raises:
        UsageError: another value, or no terminal.
    """
    asked = environ.get("INTERACTIVE", "")
    if asked in ("", "0"):
        return False
    if asked != "1":
        raise UsageError(f"INTERACTIVE is {asked!r}", where="INTERACTIVE", fix="INTERACTIVE=1 asks, nothing detects")
    if not sys.stdin.isatty():
        raise UsageError(
            "there is no terminal to ask on", where="INTERACTIVE", fix="leave it out: everything is detected"
        )
    return True


def detect(hardware: Hardware) -> Answers:
    """What is true on this machine: one process a GPU, or one on the CPU."""
    if not hardware.gpus:
        return Answers(processes=1, cpu=True, precision="bf16", found="no GPU")
    kinds = " and ".join(dict.fromkeys(gpu.name for gpu in hardware.gpus))
    return Answers(
        processes=len(hardware.gpus),
        cpu=False,
        precision="bf16" if all(gpu.bf16 for gpu in hardware.gpus) else "fp16",
        found=f"{len(hardware.gpus)} x {kinds}",
    )


def ask(found: Answers, read: Callable[[str], str]) -> Answers:
    """The answers of a person; Enter takes what was found.

    Raises:
        UsageError: the input ends before all is answered.
    """

    def question(text: str, default: str, fits: Callable[[str], bool], hint: str) -> str:
        while True:
            try:
                answer = read(f"{text} [{default}]: " if default else f"{text}: ").strip() or default
            except EOFError:
                raise UsageError(
                    "the input ended before all was answered", where="INTERACTIVE", fix="answer all"
                ) from None
            if fits(answer):
                return answer
            print(f"  {hint}")

    def number(text: str, default: int, smallest: int, largest: int) -> int:
        def fits(answer: str) -> bool:
            return answer.isdecimal() and smallest <= int(answer) <= largest

        return int(question(text, str(default), fits, f"a whole number from {smallest} to {largest}"))

    most = max(found.processes, 1) if not found.cpu else 64
    processes = number("processes on this machine" if found.cpu else "GPUs of this machine", found.processes, 1, most)
    kinds = ("bf16", "no") if found.cpu else ("bf16", "fp16", "no")
    precision = question(
        f"mixed precision ({', '.join(kinds)})", found.precision, kinds.__contains__, f"one of {', '.join(kinds)}"
    )
    answers = replace(found, processes=processes, precision=precision, nodes=number("machines", 1, 1, 4096))
    if answers.nodes == 1:
        return answers
    return replace(
        answers,
        node_rank=number("number of this machine, from 0", 0, 0, answers.nodes - 1),
        address=question("host name or address of machine 0", "", bool, "every machine needs to reach it"),
        port=number("a free port of machine 0", answers.port, 1, 65535),
    )


def render(answers: Answers, *, asked: bool = False) -> str:
    """The file's text."""
    several = answers.processes * answers.nodes > 1
    kind = ("MULTI_CPU" if answers.cpu else "MULTI_GPU") if several else "'NO'"
    address = answers.address.replace("'", "''")
    meeting = MEETING.format(address=f"'{address}'", port=answers.port) if answers.nodes > 1 else ""
    return FORM.format(
        asked=" and was told" if asked else "",
        path=SETUP_FILE,
        kind=kind,
        cpu=str(answers.cpu).lower(),
        processes=answers.processes * answers.nodes,
        found=answers.found,
        precision=f"'{answers.precision}'" if answers.precision == "no" else answers.precision,
        nodes=answers.nodes,
        rank=answers.node_rank,
        meeting=meeting,
    )


def write(text: str) -> None:
    """Write the file; an earlier one that says something else is kept beside it.

    Raises:
        EnvironmentProblem: the place cannot be written.
    """
    try:
        SETUP_FILE.parent.mkdir(exist_ok=True)
        if SETUP_FILE.is_file() and SETUP_FILE.read_text(encoding="utf-8") != text:
            kept = SETUP_FILE.with_suffix(".yaml.old")
            SETUP_FILE.replace(kept)
            print(f"the earlier one is kept in {kept}")
        SETUP_FILE.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(
            f"cannot be written: {reason}", where=str(SETUP_FILE), fix="check the folder"
        ) from error
