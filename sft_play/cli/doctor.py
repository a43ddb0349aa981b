"""`make doctor`: is this machine fit to train, and to train CONFIG? Each line ok, warning or fail, with the cure."""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.cli.checks.disk import check_disk
from sft_play.cli.checks.finding import Finding, Scope, State, fail, without_secrets
from sft_play.cli.checks.gpus import check_gpus
from sft_play.cli.checks.needs import check_needs
from sft_play.cli.checks.network import check_network
from sft_play.cli.checks.program import check_program
from sft_play.cli.checks.stack import check_stack
from sft_play.cli.checks.system import check_system
from sft_play.cli.options import Options, positive
from sft_play.config.inputs import INPUTS_OF
from sft_play.config.resolve import Resolved, resolve
from sft_play.errors import ExitCode, SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.facts.probe import probe_hardware
from sft_play.plan.select import select_gpus

JSON_VERSION = 1
WIDTH, STATE_WIDTH, NAME_WIDTH = 80, 7, 13
PINS = Path(__file__).parents[2] / "constraints.txt"
Check = Callable[[Scope], Iterator[Finding]]
GROUPS: dict[str, Check] = {
    "Program": check_program,
    "GPUs": check_gpus,
    "Machine": check_system,
    "Disk": check_disk,
    "Network and clock": check_network,
    "Stack": check_stack,
}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check group after group, printing each as it is done; torch is tried in child processes.

    Returns:
        0, or 4 where a check failed.

    Raises:
        SftPlayError: the config or a variable is wrong.
    """
    parser = Options(prog="make doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same for programs")
    parser.add_argument("--constraints", type=Path, default=PINS, help="the pins to compare with (%(default)s)")
    parser.add_argument(
        "--timeout", type=positive, default=60, help="seconds for the kernels and for the all-reduce (%(default)s)"
    )
    options = parser.parse_args(list(argv))
    path = Path(environ["CONFIG"]) if environ.get("CONFIG") else None
    resolved = resolve(path, environ, distributed=True, inputs=INPUTS_OF["doctor"], partial=path is None)
    scope = Scope(
        environ=environ,
        config=resolved.config,
        hardware=hardware_of(resolved, environ),
        constraints=options.constraints,
        seconds=options.timeout,
    )
    started, found = time.monotonic(), []
    for group, findings in examine(scope, resolved):
        found += [(group, one) for one in findings]
        if not options.json:
            print("\n".join(render_group(group, findings)), flush=True)
    seconds = time.monotonic() - started
    if options.json:
        print(json.dumps(as_json(found, seconds), indent=2))
    else:
        print(verdict([one for _, one in found], seconds))
    return ExitCode.ENVIRONMENT if any(one.state is State.FAIL for _, one in found) else ExitCode.DONE


def hardware_of(resolved: Resolved, environ: Mapping[str, str]) -> Hardware | None:
    """The GPUs that a run over all of them would take; None where asking fails, which the checks then say."""
    try:
        return select_gpus(probe_hardware(environment=environ), resolved.config.dist.gpus, default_count=None)
    except SftPlayError:
        return None


def examine(scope: Scope, resolved: Resolved) -> Iterator[tuple[str, list[Finding]]]:
    """Every group's findings as they come; with a config, what it needs comes last."""
    groups = dict(GROUPS)
    if resolved.path is not None:
        groups[str(resolved.path)] = lambda scope: check_needs(scope, resolved)
    for group, check in groups.items():
        yield group, [without_secrets(one, scope.environ) for one in guarded(check, scope)]


def guarded(check: Check, scope: Scope) -> Iterator[Finding]:
    """The findings of a check; one that breaks is a finding itself, and the others go on."""
    try:
        yield from check(scope)
    except Exception as error:
        cure = "ARGS=--debug does not change this line; report it"
        yield fail("this check", f"broke off with {type(error).__name__}: {error}", cure)


def render_group(group: str, findings: Sequence[Finding]) -> Iterator[str]:
    """A heading and the findings in three columns, at 80 characters."""
    yield group
    indent = " " * (2 + STATE_WIDTH + 2 + NAME_WIDTH + 1)
    for one in findings:
        head = f"  {one.state:<{STATE_WIDTH}}  {one.name:<{NAME_WIDTH}} "
        yield from _wrapped(one.found, head, indent)
        if one.cure:
            yield from _wrapped(one.cure, f"{indent}-> ", f"{indent}   ")
    yield ""


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    words = " ".join(text.split())
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def verdict(findings: Sequence[Finding], seconds: float) -> str:
    """The last line: how many of each."""
    count = Counter(one.state for one in findings)
    ready = "not ready to train" if count[State.FAIL] else "ready to train"
    warnings = f"{count[State.WARNING]} warning{'' if count[State.WARNING] == 1 else 's'}"
    return f"verdict: {ready} ({count[State.FAIL]} failed, {warnings}, {count[State.OK]} ok; {seconds:.0f} s)"


def as_json(found: Sequence[tuple[str, Finding]], seconds: float) -> dict[str, Any]:
    """The page for programs; `version` rises when a field changes."""
    return {
        "version": JSON_VERSION,
        "ready": all(one.state is not State.FAIL for _, one in found),
        "seconds": round(seconds, 1),
        "findings": [
            {"group": group, "name": one.name, "state": one.state, "found": one.found, "cure": one.cure or None}
            for group, one in found
        ],
    }
