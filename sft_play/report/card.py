"""The README.md of a result, in the hub's form: what it was made from and how, from the run's own records.

It may be published, so it names no place on this machine: folders and files by their last names, hub ids in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from sft_play.config.secrets import redacted
from sft_play.report import numbers
from sft_play.report.read import RunFacts
from sft_play.report.trained import method_of, sources_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = re.compile(r"models--(.+?)--(.+?)/snapshots/([0-9a-f]{40})")
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
# What a reader asks for first; all others are in the run's config.yaml.
_SETTINGS = (
    "model.max_seq_len", "train.learning_rate", "train.scheduler", "train.warmup", "train.epochs", "train.max_steps",
    "train.weight_decay", "data.loss_on", "data.packing", "train.seed",
)  # fmt: skip


def model_card(run: RunFacts, *, kind: str, check: Mapping[str, Any] | None = None) -> str:
    """The card's text.

    Args:
        kind: `adapter` or `model`.
        check: of a merge, what comparing it with base and adapter found.
    """
    base = base_of(run)
    license_ = license_of(Path(str(run.told.get("model_path") or "")))
    lines = ["---", *_front_matter(run, base, license_, kind), "---", "", f"# {run.name}", ""]
    what = "A LoRA adapter for" if kind == "adapter" else "A fine-tune of"
    lines += [f"{what} {base or _last_name(run)}, made with sft-play.", ""]
    for title, rows in _sections(run, base, license_, check).items():
        if rows:
            lines += [f"## {title}", "", "| | |", "|---|---|"]
            lines += [f"| {name} | {_cell(text)} |" for name, text in rows]
            lines.append("")
    return redacted("\n".join(lines))


def base_of(run: RunFacts) -> str:
    """The base's hub id; empty for a model that is known as a folder of this machine only."""
    if cached := _CACHED.search(str(run.told.get("model_path") or "")):
        return f"{cached[1]}/{cached[2]}"
    return ""


def revision_of(run: RunFacts) -> str:
    """The commit of the hub that the base came from; empty for a folder."""
    cached = _CACHED.search(str(run.told.get("model_path") or ""))
    return cached[3] if cached else ""


def license_of(base: Path) -> str:
    """The licence that the base's own card names, else the first line of its licence file, else `not stated`."""
    card = base / "README.md"
    if card.is_file():
        head = card.read_text(encoding="utf-8", errors="replace").split("---")
        found = re.search(r"^license:\s*(\S+)", head[1], re.M) if len(head) > 2 and not head[0].strip() else None
        if found:
            return found[1].strip("'\"")
    for name in _LICENSES:
        if (base / name).is_file():
            lines = (base / name).read_text(encoding="utf-8", errors="replace").split("\n")
            return next((f"see its {name}: {line.strip()}"[:100] for line in lines if line.strip()), f"see its {name}")
    return "not stated"


def _front_matter(run: RunFacts, base: str, license_: str, kind: str) -> Iterator[str]:
    yield "library_name: " + ("peft" if kind == "adapter" else "transformers")
    yield "pipeline_tag: text-generation"
    if base:
        yield f"base_model: {base}"
    yield "license: " + (license_ if re.fullmatch(r"[A-Za-z0-9.-]+", license_) else "unknown")
    yield "tags:"
    yield from (f"- {tag}" for tag in ("sft-play", "sft", *(["lora"] if run.stamp.get("mode") != "full" else [])))
    ids = [name for name in map(data_name, sources_of(run.config)) if _HUB_ID.fullmatch(name)]
    if ids:
        yield "datasets:"
        yield from (f"- {name}" for name in dict.fromkeys(ids))


def data_name(source: str) -> str:
    """A hub id as it is; of a path its last name."""
    name = source.partition(":")[0].partition("@")[0]
    local = source.startswith((".", "/", "~")) or PurePath(name).suffix or Path(name).exists()
    return name if _HUB_ID.fullmatch(name) and not local else PurePath(source).name


def _sections(
    run: RunFacts, base: str, license_: str, check: Mapping[str, Any] | None
) -> dict[str, list[tuple[str, str]]]:
    stamp = run.stamp
    versions = {"sft-play": stamp.get("sft_play"), "Python": stamp.get("python"), **(stamp.get("versions") or {})}
    return {
        "Base": [
            ("Model", base or f"{_last_name(run)} (a local folder)"),
            *([("Revision", revision_of(run))] if revision_of(run) else []),
            ("Identity of its files", str(stamp.get("base_identity") or "not known")),
            ("Licence", license_),
        ],
        "Data": [("Trained on", ", ".join(map(data_name, sources_of(run.config)))), *_counts(run)],
        "Training": [("Method", method_of(run.config)), *_settings(run)],
        "Scores": list(_scores(run)),
        "Merge": [] if check is None else list(_merge(check)),
        "Versions": [(name, str(value)) for name, value in versions.items() if value and value != "absent"],
    }


def _last_name(run: RunFacts) -> str:
    return PurePath(str((run.config.get("model") or {}).get("name") or "a model")).name


def _counts(run: RunFacts) -> Iterator[tuple[str, str]]:
    facts = (run.data.get("tokens") or {}).get("facts") or {}
    for split, figures in sorted((facts.get("splits") or {}).items()):
        rows, tokens = figures.get("rows_kept"), figures.get("tokens")
        if rows is not None:
            yield f"Rows, {split}", f"{rows:,}" + (f" ({tokens:,} tokens)" if tokens else "")


def _settings(run: RunFacts) -> Iterator[tuple[str, str]]:
    plan, settings = run.plan, run.stamp.get("settings") or {}
    if plan.get("global_batch"):
        yield "Rows a step", str(plan["global_batch"])
    if plan.get("dtype"):
        yield "Precision", f"weights {plan['dtype']}, computed in {plan.get('autocast') or plan['dtype']}"
    if plan.get("optimizer"):
        yield "Optimizer", str(plan["optimizer"])
    for key in _SETTINGS:
        if settings.get(key) is not None:
            yield f"`{key}`", str(settings[key])
    if run.record.get("steps"):
        yield "Steps done", f"{run.record['steps']:,}"


def _scores(run: RunFacts) -> Iterator[tuple[str, str]]:
    record = run.record
    before, after = record.get("eval_loss_before"), record.get("eval_loss")
    if after is not None:
        yield "Held-out loss", f"{after:.4f}" + (f" ({before:.4f} before)" if before is not None else "")
    shown = {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    for name, value in ((record.get("evaluation") or {}).get("metrics") or {}).items():
        if name not in shown and isinstance(value, int | float):
            yield name.removeprefix("eval_").replace("_", " "), numbers.number(value)


def _merge(check: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Compared with base and adapter", f"{check['rows']} rows, {check['positions']} positions, in {check['dtype']}"
    yield "Largest difference of logits", f"{check['largest']:.3g} (largest logit {check['largest_logit']:.1f})"
    yield "Likeliest token the same", f"{check['top1_agreement']:.1%} of positions"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
