"""What a run trained, and on what: model, method, data, devices, versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sft_play.report import numbers
from sft_play.report.read import RunFacts


def what_was_trained(run: RunFacts) -> list[tuple[str, str]]:
    """Model, method, data, devices: one line each; what is not known is left out."""
    config, plan, record = run.config, run.plan, run.record
    lines = {
        "Model": _model(run),
        "Method": method_of(config),
        "Parameters": _parameters(record),
        "Data": ", ".join(sources_of(config)),
        "Batch": _batch(plan),
        "Length": f"up to {plan['seq_len']:,} tokens" if plan.get("seq_len") else "",
        "Devices": _devices(run),
        "Precision": _precision(plan),
        "Result": str(run.path / record["result"]) if record.get("result") else "",
    }
    return [(name, text) for name, text in lines.items() if text]


def _model(run: RunFacts) -> str:
    model = run.config.get("model") or {}
    return " @ ".join(str(part) for part in (model.get("name"), model.get("revision")) if part)


def method_of(config: dict[str, Any]) -> str:
    """How the weights were changed; empty where the config does not say."""
    tuning = config.get("tuning") or {}
    mode, lora = tuning.get("mode"), tuning.get("lora") or {}
    if not mode:
        return ""
    if mode == "full":
        return "full: every weight"
    kinds = [name for key, name in (("use_dora", "DoRA"), ("use_rslora", "rsLoRA")) if lora.get(key)]
    words = {"lora": "LoRA", "qlora": "QLoRA"}.get(mode, mode)
    return ", ".join([f"{words} r {lora.get('r')}", f"alpha {numbers.number(lora.get('alpha'))}", *kinds])


def _parameters(record: dict[str, Any]) -> str:
    trained, all_ = record.get("trainable_parameters"), record.get("parameters")
    return f"{trained:,} of {all_:,} trained ({trained / all_:.2%})" if trained and all_ else ""


def sources_of(config: dict[str, Any]) -> Iterator[str]:
    """What the config names as training data."""
    train = (config.get("data") or {}).get("train") or []
    for one in [train] if isinstance(train, str) else train:
        yield one if isinstance(one, str) else "@".join(filter(None, (str(one.get("path")), one.get("revision"))))


def _batch(plan: dict[str, Any]) -> str:
    if not plan.get("global_batch"):
        return ""
    micro, accumulated = plan.get("micro_batch"), plan.get("grad_accum")
    return f"{plan['global_batch']} rows a step ({micro} at once on a device, {accumulated} accumulated)"


def _devices(run: RunFacts) -> str:
    plan, names = run.plan, run.record.get("device_names")
    if not plan.get("device_name"):
        return ""
    starts = run.of("start")
    many = max(plan.get("world_size") or 1, len(plan.get("device_uuids") or []))
    listed = names or (starts[-1].get("devices") if starts else None) or []
    told = f"{many} x {plan['device_name']}, {plan.get('strategy')}"
    machines = f" on {plan['nodes']} machines" if (plan.get("nodes") or 1) > 1 else ""
    distinct = {str(name).partition(": ")[2].partition(" (")[0] or str(name) for name in listed}
    return told + machines + (f" ({', '.join(sorted(distinct))})" if len(distinct) > 1 else "")


def _precision(plan: dict[str, Any]) -> str:
    parts = [f"weights {plan['dtype']}" if plan.get("dtype") else "", f"computed in {plan.get('autocast') or 'that'}"]
    return ", ".join(filter(None, parts)) if parts[0] else ""


def environment(run: RunFacts) -> list[tuple[str, str]]:
    """Versions, and what the run's data and model are known by."""
    stamp = run.stamp
    versions = {"sft-play": stamp.get("sft_play"), "Python": stamp.get("python"), **(stamp.get("versions") or {})}
    known = {"base model": stamp.get("base_identity"), "data": str(stamp.get("data_fingerprint") or "")[:16]}
    return [(name, str(value)) for name, value in {**versions, **known}.items() if value]
