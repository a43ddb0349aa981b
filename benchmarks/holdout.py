"""Do the constants generalise? Refit them without one family of runs at a time, and predict that family.

    python benchmarks/holdout.py --table FILE.csv

Each constant of `plan.kernels` and `plan.rates` that was fitted is scaled by a few factors, one after the other,
to the least error over the other families (each weighing the same); the family left out is then predicted with
them. Starts from the shipped constants rounded to one digit, so that a family cannot hide in its own start values.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from plan_accuracy import Prediction, figures, predict  # noqa: E402
from table import RowProblem, Run, read_rows, read_run  # noqa: E402

from sft_play.plan import allocator, kernels, rates  # noqa: E402
from sft_play.plan.settings import Kernels, Loss  # noqa: E402

FACTORS = (0.8, 0.9, 1.0, 1.1, 1.25)
SWEEPS = 2


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One fitted constant: how to read and write it, and the kind of figure that it is fitted to."""

    name: str
    kind: str
    read: Callable[[], float]
    write: Callable[[float], None]


def _attribute(module: Any, name: str, kind: str) -> Knob:
    return Knob(name=name, kind=kind, read=lambda: getattr(module, name), write=lambda v: setattr(module, name, v))


def _field(table: Any, keys: Sequence[Any], field: str, kind: str) -> Knob:
    """A field of frozen values in a table, the same for all keys."""

    def write(value: float) -> None:
        for key in keys:
            table[key] = replace(table[key], **{field: value})

    return Knob(name=f"{keys[0]} {field}", kind=kind, read=lambda: getattr(table[keys[0]], field), write=write)


def _entry(table: dict[Kernels, float], key: Kernels) -> Knob:
    def write(value: float) -> None:
        table[key] = value

    return Knob(name=f"pointwise {key}", kind="tokens/s", read=lambda: table[key], write=write)


def _module_field(name: str, field: str) -> Knob:
    def write(value: float) -> None:
        setattr(kernels, name, replace(getattr(kernels, name), **{field: value}))

    return Knob(
        name=f"{name} {field}", kind="printed", read=lambda: getattr(getattr(kernels, name), field), write=write
    )


def knobs() -> list[Knob]:
    """Every fitted constant that the table can speak about."""
    titan = [(k, Loss.FULL) for k in (Kernels.HF, Kernels.TORCHTUNE, Kernels.TORCHTITAN)]
    triton = [(k, Loss.FULL) for k in (Kernels.TRITON, Kernels.LIGER, Kernels.UNSLOTH)]
    tune = [(Kernels.TORCHTUNE, Loss.CHUNKED), (Kernels.TORCHTITAN, Loss.CHUNKED)]
    layers = ("LIVE_TRAINED", "LIVE_FROZEN", "STORED_TRAINED", "STORED_FROZEN", "STORED_SELECTIVE")
    pointwise = [_entry(rates.POINTWISE, kernel) for kernel in (Kernels.HF, Kernels.TRITON, Kernels.TORCHTUNE)]
    families = ("ampere-datacenter", "hopper-limited")
    return [
        *(_field(kernels.LOSS_COSTS, keys, "per_logit", "printed") for keys in (titan, triton, tune)),
        *(_module_field(name, field) for name in layers for field in ("inner", "hidden")),
        _attribute(kernels, "EAGER_NORM_LIVE", "printed"),
        _attribute(allocator, "CONTEXT_BYTES", "device"),
        _attribute(allocator, "NCCL_BYTES", "device"),
        _field(kernels.CACHE_COSTS, [Kernels.HF, Kernels.TORCHTUNE], "logits_share", "device"),
        _field(kernels.CACHE_COSTS, [Kernels.TRITON, Kernels.LIGER], "logits_share", "device"),
        *(_field(rates.EFFICIENCY, [family], "matmul", "tokens/s") for family in families),
        _attribute(rates, "ADAPTER_TRAFFIC", "tokens/s"),
        _attribute(rates, "FSDP1_SECONDS_A_LAYER", "tokens/s"),
        *pointwise,
    ]


def mean_error(rows: Sequence[Prediction], kind: str) -> float:
    """Mean absolute error of one kind, families alike; errors over 30% count as 30%, as outliers are not fitted."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        kinds = ("allocated", "reserved") if kind == "printed" else (kind,)
        errors = [abs(error) for one in kinds if (error := row.error(one)) is not None]
        if errors:
            by_family.setdefault(row.family, []).append(min(errors[0], 0.3))
    return sum(sum(errors) / len(errors) for errors in by_family.values()) / max(1, len(by_family))


def fit(runs: Sequence[Run], chosen: Sequence[Knob]) -> None:
    """Coordinate descent over the knobs, in place."""
    for _ in range(SWEEPS):
        for knob in chosen:
            start, best = knob.read(), (float("inf"), 0.0)
            for factor in FACTORS:
                knob.write(start * factor)
                best = min(best, (mean_error([predict(run) for run in runs], knob.kind), start * factor))
            knob.write(best[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predict each family with constants fitted without it.")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the report (default: docs)")
    options = parser.parse_args(arguments)
    lines: list[str] = []
    runs = []
    for row in read_rows(options.table):
        try:
            runs.append(read_run(row))
        except RowProblem as problem:
            print(f"{row['id']}: {problem}")
    chosen = knobs()
    shipped, constants = [knob.read() for knob in chosen], digest(chosen)
    held: list[Prediction] = []
    for family in sorted({run.family for run in runs}):
        for knob, value in zip(chosen, shipped, strict=True):
            knob.write(float(f"{value:.1g}"))
        fit([run for run in runs if run.family != family], chosen)
        found = [predict(run) for run in runs if run.family == family]
        held += found
        lines.append(_line(family, figures(found)))
        print(lines[-1], flush=True)
    lines.append(_line("all held out", figures(held)))
    print(lines[-1])
    (options.docs / "plan_holdout.md").write_text(render(lines, constants), encoding="utf-8")
    return 0


def digest(chosen: Sequence[Knob]) -> str:
    """What the constants are known by, 12 hex digits: the report is of others once it differs."""
    return sha256(json.dumps([[knob.name, knob.read()] for knob in chosen]).encode()).hexdigest()[:12]


def render(lines: Sequence[str], constants: str) -> str:
    """docs/plan_holdout.md.

    Args:
        constants: the digest of those that ship.
    """
    return INTRODUCTION.format(constants=constants) + "\n".join(lines) + "\n"


INTRODUCTION = """# Does the plan generalise?

Made by `benchmarks/holdout.py`: each family of runs predicted with constants that were refitted, from rounded start
values, without it. Median (and 90th percentile) of |predicted - measured| / measured. The constants that ship:
`{constants}`.

| family left out | memory | p90 | allocated | p90 | device | p90 | tokens/s | p90 | verdict |
|---|---|---|---|---|---|---|---|---|---|
"""


def _line(name: str, values: dict[str, Any]) -> str:
    cells = [name]
    for kind in ("printed", "allocated", "device", "tokens/s"):
        found = values[kind]
        cells += [f"{found['median']:.1%}", f"{found['p90']:.1%}"] if found else ["-", "-"]
    return "| " + " | ".join([*cells, f"{values['verdict_right']:.1%}"]) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
