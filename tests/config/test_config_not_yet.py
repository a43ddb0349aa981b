"""What cannot be honoured yet is refused by name, and what works is not."""

from __future__ import annotations

import pytest
from written import ResolveText

from sft_play.config import not_yet
from sft_play.config.keys import KEYS
from sft_play.config.not_yet import NOT_YET, NotYet, unavailable
from sft_play.config.origin import Origin, OriginKind, Resolved
from sft_play.config.rules import refuse_unavailable
from sft_play.config.schema import Config
from sft_play.errors import NotAvailableError, SeveralErrors

# key -> a value that is refused, where the table itself names none
EXAMPLES = {
    "data.train": [{"path": "a", "weight": 2}],
    "data.validation": [{"path": "a", "weight": 2}, "b"],
    "data.test": ["a", {"path": "a", "weight": 0.5}],
    "train.metric_for_best_model": "rougeL",
    "dist.prefetch": True,
}


def _other_value(entry: NotYet) -> object:
    """A value of the key's type that is not its default."""
    key = KEYS[entry.key]
    if key.name in EXAMPLES:
        return EXAMPLES[key.name]
    if key.type.boolean:
        return key.default is not True
    others = [choice for choice in key.type.choices if choice not in (key.default, "auto", "all")]
    if others:
        return others[0]
    return 0.5 if "below 1" in key.type.words or "at most 1" in key.type.words else 7


def _resolved(name: str, value: object) -> Resolved:
    """A config with one value set, past the rules: only the table is looked at here."""
    tree: dict[str, dict[str, object]] = {"model": {"name": "m"}, "data": {"train": "a"}}
    *sections, leaf = name.split(".")
    branch: dict[str, object] = tree  # type: ignore[assignment]
    for section in sections:
        branch = branch.setdefault(section, {})  # type: ignore[assignment]
    branch[leaf] = value
    origin = Origin(kind=OriginKind.FILE, where="x.yaml:7", value=value)
    return Resolved(config=Config.model_validate(tree), origins=dict.fromkeys(KEYS, origin))


# What an entry would be like, for the times when the table is empty.
EXAMPLE = NotYet(key="tuning.backend", values=("unsloth",))
CASES = [(entry, value) for entry in (*NOT_YET, EXAMPLE) for value in entry.values or (_other_value(entry),)]


@pytest.mark.parametrize(("entry", "value"), CASES, ids=lambda part: getattr(part, "key", str(part)))
def test_every_entry_refuses_by_name_and_place(entry: NotYet, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", (entry,))
    with pytest.raises(SeveralErrors) as caught:
        refuse_unavailable(_resolved(entry.key, value))
    (error,) = caught.value.errors
    assert isinstance(error, NotAvailableError)
    assert error.line().startswith(f"x.yaml:7: {entry.key}: ")
    assert "not available yet" in error.what
    assert error.fix


def test_every_entry_names_a_key_once() -> None:
    names = [entry.key for entry in NOT_YET]
    assert len(set(names)) == len(names)
    assert set(names) <= set(KEYS)
    for entry in NOT_YET:
        assert not entry.values or set(entry.values) <= set(KEYS[entry.key].type.choices)
        assert not entry.refuses(KEYS[entry.key].default)


def test_the_defaults_can_be_honoured(resolve_text: ResolveText) -> None:
    refuse_unavailable(resolve_text())


WORKING = [
    ("model.attention", "flash_attention_2"),
    ("model.attention", "flex_attention"),
    ("model.kernels", "none"),
    ("model.kernels", "liger"),
    ("model.chat_template", "templates/mine.jinja"),
    ("model.chat_template", "chatml"),
    ("model.trust_remote_code", True),
    ("tuning.backend", "unsloth"),
    ("tuning.mode", "qlora"),
    ("tuning.mode", "full"),
    ("tuning.quantization.type", "fp4"),
    ("tuning.quantization.double", False),
    ("tuning.lora.use_dora", True),
    ("data.train", ["a", {"path": "b", "weight": 1}]),
    ("data.loss_on", "last"),
    ("data.on_overlong", "drop"),
    ("data.max_rows", 5),
    ("train.optim", "adafactor"),
    ("train.loss", "chunked"),
    ("train.loss", "full"),
    ("train.label_smoothing", 0.1),
    ("train.group_by_length", True),
    ("train.torch_compile", True),
    ("train.fp8", True),
    ("train.neftune_noise_alpha", 5),
    ("train.metric_for_best_model", "eval_loss"),
    ("train.early_stopping_patience", 3),
    ("train.save_strategy", "epoch"),
    ("train.deterministic", True),
    ("dist.strategy", "single"),
    ("dist.strategy", "zero2"),
    ("dist.gpus", 1),
    ("dist.gpus", [0, 3]),
    ("dist.zero_level", 3),
    ("dist.shard_weights", True),
    ("dist.nvme_path", "/fast"),
    ("dist.num_nodes", 2),
    ("dist.deepspeed_config", "ds.json"),
    ("run.report_to", []),
    ("run.report_to", ["tensorboard", "wandb", "mlflow", "trackio"]),
    ("run.name", "x"),
]


@pytest.mark.parametrize(("name", "value"), WORKING)
def test_what_works_is_not_refused(name: str, value: object) -> None:
    assert unavailable(_resolved(name, value)) == ()


def test_all_refusals_come_at_once(resolve_text: ResolveText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_yet, "NOT_YET", (EXAMPLE, NotYet(key="run.name")))
    with pytest.raises(SeveralErrors) as caught:
        refuse_unavailable(resolve_text("tuning: {backend: unsloth}\nrun: {name: x}\n"))
    places = {error.where for error in caught.value.errors}
    assert places == {"x.yaml:3", "x.yaml:4"}
