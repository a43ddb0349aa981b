"""For a config that does not fit: the smallest change that would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import GIB, Hardware
from sft_play.plan.strategy import Candidate, Choice

if TYPE_CHECKING:
    from sft_play.plan.build import PlanInputs

SHORTEST_LENGTH = 256


def nearest_fitting(inputs: PlanInputs, choose: Callable[[PlanInputs], Choice]) -> str:
    """The first of `changes` under which something fits, as what to type; advice where none does.

    Args:
        choose: `plan.build.choose`.
    """
    for words, changed in changes(inputs):
        try:
            chosen = choose(changed).chosen
        except ConfigError:
            continue
        if chosen:
            return f"{words} fits ({chosen.layout.name}, {_needed(chosen, changed.hardware)})"
    return "nothing smaller fits either: take a smaller model or more GPUs"


def _needed(chosen: Candidate, hardware: Hardware) -> str:
    if hardware.gpus:
        return f"{chosen.memory.needed_bytes / GIB:.1f} GiB a GPU"
    return f"{chosen.memory.allocated_bytes / GIB:.1f} GiB of memory"


def changes(inputs: PlanInputs) -> Iterator[tuple[str, PlanInputs]]:
    """Changes from the least to the most felt: what to type, and the inputs with it."""
    config = inputs.config
    lean: dict[str, Any] = {"batch_size": 1, "grad_accum": "auto"}
    rows = config.train.batch_size
    while isinstance(rows, int) and rows > 1:
        rows //= 2
        yield f"TRAIN_BATCH_SIZE={rows} TRAIN_GRAD_ACCUM=auto", _with(inputs, train={**lean, "batch_size": rows})
    if config.train.gradient_checkpointing is False:
        lean["gradient_checkpointing"] = True
        yield "TRAIN_GRADIENT_CHECKPOINTING=true", _with(inputs, train=lean)
    if inputs.only:
        yield "DIST_STRATEGY=auto", replace(_with(inputs, train=lean), only=())
    mode = config.tuning.mode.value
    for smaller in ("lora", "qlora") if mode == "full" else ("qlora",) if mode == "lora" else ():
        yield f"TUNING_MODE={smaller}", _with(inputs, train=lean, tuning={"mode": smaller})
    length = config.model.max_seq_len
    while length > SHORTEST_LENGTH:
        length //= 2
        yield f"MODEL_MAX_SEQ_LEN={length}", _with(inputs, train=lean, model={"max_seq_len": length})
        if mode != "qlora":
            both = _with(inputs, train=lean, model={"max_seq_len": length}, tuning={"mode": "qlora"})
            yield f"TUNING_MODE=qlora MODEL_MAX_SEQ_LEN={length}", both


def _with(inputs: PlanInputs, **sections: dict[str, Any]) -> PlanInputs:
    values = inputs.config.model_dump()
    for section, keys in sections.items():
        values[section] = {**values[section], **keys}
    return replace(inputs, config=Config.model_validate(values))
