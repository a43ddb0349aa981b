"""`python -m sft_play.cli.presets`: write into each preset of configs/ what the plan gives on its hardware.

A preset names its machine in a comment, `# hardware: 2xRTX4090`; the line after it, `# plan there: ...`, is made here
and held current by tests/configs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sft_play.cli.inputs import planning_facts
from sft_play.config.resolve import resolve
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.hardware import parse_hardware
from sft_play.plan.build import PlanInputs, choose, does_not_fit, gib
from sft_play.plan.select import allowed_layouts, select_gpus

FOLDER = Path("configs")
COMMAND = "python -m sft_play.cli.presets"
_HARDWARE = re.compile(r"^# hardware: (\S+)\n(?:# plan there: .*\n)?", re.M)


def presets(folder: Path) -> list[Path]:
    """The configs that name the machine they are made for."""
    return sorted(path for path in folder.glob("*.yaml") if _HARDWARE.search(path.read_text(encoding="utf-8")))


def with_plan_line(path: Path) -> str:
    """A preset's text with its plan line as it has to be.

    Raises:
        ConfigError: the preset does not fit the machine it names.
        SftPlayError: its config or machine cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    found = _HARDWARE.search(text)
    assert found is not None
    machine = found[1]
    line = f"# hardware: {machine}\n# plan there: {plan_line(path, machine)}\n"
    return text[: found.start()] + line + text[found.end() :]


def plan_line(path: Path, machine: str) -> str:
    """Strategy, batch, memory on a GPU and speed, as `make plan` gives them before the data is prepared.

    Raises:
        ConfigError: nothing fits.
    """
    config = resolve(path, {}).config
    hardware = select_gpus(parse_hardware(machine), config.dist.gpus, default_count=None)
    inputs = PlanInputs(config=config, hardware=hardware, facts=planning_facts(config), only=allowed_layouts(config))
    choice = choose(inputs)
    chosen = choice.chosen
    if chosen is None:
        raise does_not_fit(inputs, choice)
    settings, speed = chosen.settings, chosen.speed
    gpus = hardware.world_size
    words = [
        chosen.layout.name,
        f"{settings.micro_batch} x {settings.grad_accum}" + (f" rows on each of {gpus} GPUs" if gpus > 1 else " rows"),
        f"{gib(chosen.memory.needed_bytes)} of {gib(hardware.smallest_gpu_bytes)} GiB" + (" a GPU" if gpus > 1 else ""),
        f"about {speed.tokens_per_second:,.0f} tokens/s" if speed else "speed unknown",
    ]
    return ", ".join(words)


def main(folder: Path = FOLDER) -> int:
    """Rewrite the presets whose line is not current; one that does not fit is an error after the others are done."""
    refused: list[str] = []
    for path in presets(folder):
        try:
            text = with_plan_line(path)
        except ConfigError as error:
            refused.append(f"error: {path}: {error.line()}")
            continue
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    print(*refused, sep="\n", end="\n" if refused else "", file=sys.stderr)
    return 2 if refused else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SftPlayError as problem:
        sys.exit(f"error: {problem}")
