"""`dist.deepspeed_config`: a user's DeepSpeed file as settings of the config, so that nothing is said twice unseen.

What a key of the config means too becomes that key's value, with the file's line as its origin; a key that somebody set
to something else is an error that shows both. What only the engine knows stays in the file and goes to it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config import deepspeed_keys as known
from sft_play.config.json_text import line_of, parse_json
from sft_play.config.keys import KEYS
from sft_play.config.nearest import nearest, spoken
from sft_play.config.origin import Layer, Origin, OriginKind, Setting
from sft_play.config.sources import read_text
from sft_play.config.values import loosen, show
from sft_play.errors import ConfigError, SftPlayError, UnknownKeyError

AUTO = "auto"
KEY = "dist.deepspeed_config"
OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
Names = tuple[str, ...]


def read_deepspeed_file(path: Path, said_at: str) -> tuple[dict[str, Any], str]:
    """The file's values and its text.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds something else than keys and values.
    """
    text = read_text(path, said_at)
    try:
        values = parse_json(text)
    except ValueError as error:
        reason = str(error).replace("<string>:", "line ")
        raise ConfigError(
            f"not valid JSON: {reason}", where=str(path), fix="comments and commas at the end are fine"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError("the file holds no mapping", where=str(path), fix='write { "zero_optimization": ... }')
    return values, text


def deepspeed_layer(settings: Mapping[str, Setting]) -> tuple[Layer, list[SftPlayError]]:
    """What the file that `dist.deepspeed_config` names adds to the settings, and everything that is wrong with it."""
    named = settings.get(KEY)
    if named is None or not isinstance(named.origin.value, str):
        return Layer(settings={}), []
    path = Path(named.origin.value)
    try:
        values, text = read_deepspeed_file(path, named.origin.where)
    except ConfigError as error:
        return Layer(settings={}), [error]
    reader = _Reader(path=path, text=text, values=values, given=settings, kind_of=named)
    reader.read()
    return Layer(settings=reader.settings, notes=tuple(reader.notes)), reader.errors


@dataclass(kw_only=True)
class _Reader:
    """One file while its values become settings."""

    path: Path
    text: str
    values: dict[str, Any]
    given: Mapping[str, Setting]
    kind_of: Setting
    settings: dict[str, Setting] = field(default_factory=dict)
    errors: list[SftPlayError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self) -> None:
        self._refuse_unknown()
        for names, key in known.MAPPED.items():
            self._take(key, names, self._at(names))
        for names, wanted in known.FIXED.items():
            value = self._at(names)
            if value not in (None, AUTO, wanted):
                self._error(names, f"{_said(names, value)} is not offered", f"write {show(wanted)}, or remove it")
        self._read_zero()
        self._read_optimizer()
        self._read_scheduler()

    def _at(self, names: Names) -> Any:
        value: Any = self.values
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def _place(self, names: Names) -> str:
        return f"{self.path}:{line_of(self.text, *names)}"

    def _error(self, names: Names, what: str, fix: str) -> None:
        self.errors.append(ConfigError(what, where=self._place(names), fix=fix))

    def _take(self, key: str, names: Names, value: Any, *, shown: Any = None) -> None:
        """Set a key from the file, unless the file leaves it to us; a key with another value is an error.

        Args:
            shown: what the file says, where `value` is that in the key's words.
        """
        if value is None or value == AUTO:
            return
        value = loosen(KEYS[key], value)
        own = self.given.get(key)
        weaker = own is None or own.origin.kind is OriginKind.SETUP
        if own is not None and not weaker and own.origin.value not in (AUTO, value):
            said = _said(names, value if shown is None else shown)
            what = f"{said} contradicts {key}: {show(own.origin.value)} ({own.origin.where})"
            self._error(names, what, 'make them equal, or write "auto" in the file')
            return
        earlier = self.settings.get(key)
        if earlier is not None and earlier.origin.value != value:
            what = f"{_said(names, value)} contradicts {earlier.origin.given_as} ({earlier.origin.where})"
            self._error(names, what, "keep one of them")
            return
        place = self._place(names)
        origin = Origin(kind=self.kind_of.origin.kind, where=place, value=value, given_as=".".join(names))
        self.settings[key] = Setting(key=key, origin=origin, error_place=place)

    def _refuse_unknown(self) -> None:
        every = (*known.PASSED, *known.REFUSED)
        for name in self.values:
            if name in known.REFUSED:
                self._error((name,), f"{name} cannot be had here", known.REFUSED[name])
            elif name not in known.PASSED:
                self._unknown((name,), every)
        self._refuse_among(("zero_optimization",), (*known.ZERO, *OLD_OFFLOAD))
        for section in ("offload_optimizer", "offload_param"):
            self._refuse_among(("zero_optimization", section), known.OFFLOAD)
        self._refuse_among(("optimizer", "params"), known.OPTIMIZER_PARAMS)
        self._refuse_among(("scheduler", "params"), known.SCHEDULER_PARAMS)
        for name, why in known.ZERO_REFUSED.items():
            if self._at(("zero_optimization", name)) not in (None, False, AUTO):
                self._error(("zero_optimization", name), f"{name} cannot be had here", why)

    def _refuse_among(self, names: Names, allowed: tuple[str, ...]) -> None:
        section = self._at(names)
        if section is not None and not isinstance(section, dict):
            if names[-1] not in ("offload_optimizer", "offload_param") or section != AUTO:
                self._error(names, f"{'.'.join(names)} takes a mapping, not {show(section)}", "write { ... }")
            return
        for name in section or {}:
            if name not in allowed:
                self._unknown((*names, name), allowed)

    def _unknown(self, names: Names, allowed: tuple[str, ...]) -> None:
        near = spoken(nearest(names[-1], allowed))
        what = f"DeepSpeed has no key {'.'.join(names)}" + (f", {near}" if near else "")
        self.errors.append(UnknownKeyError(what, where=self._place(names), fix="" if near else "remove it"))

    def _read_zero(self) -> None:
        names = ("zero_optimization", "stage")
        stage = self._at(names)
        if stage in (1, 2, 3) and not isinstance(stage, bool):
            self._take("dist.strategy", names, f"zero{stage}", shown=stage)
        elif stage == 0:
            self._error(names, "stage 0 shards nothing", "make train-distributed is DDP; ZeRO begins at stage 1")
        elif stage not in (None, AUTO):
            self._error(names, f"stage takes 1, 2 or 3, not {show(stage)}", "write 1, 2, 3 or auto")
        devices = {name: self._device(name) for name in ("offload_optimizer", "offload_param")}
        optimizer, weights = devices["offload_optimizer"], devices["offload_param"]
        if optimizer is None and weights is None:
            return
        if weights not in (None, "none") and weights != optimizer:
            at = ("zero_optimization", "offload_param")
            fix = "write the same device into offload_optimizer"
            self._error(at, f"weights on {weights} beside an optimizer on {optimizer or 'the GPU'} is not offered", fix)
            return
        self._take_offload(optimizer, weights)

    def _take_offload(self, optimizer: str | None, weights: str | None) -> None:
        level = "params" if weights not in (None, "none") else "none" if optimizer == "none" else "optimizer"
        section = "offload_param" if level == "params" else "offload_optimizer"
        names: Names = ("zero_optimization", section, "device")
        if self._at(names) is None:
            names = names[:1]
        self._take("dist.cpu_offload", names, level, shown=weights if level == "params" else optimizer)

    def _device(self, section: str) -> str | None:
        """Where a part rests: `none`, `cpu`, `nvme`, or None where the file says nothing of it."""
        names: Names
        for old, new in OLD_OFFLOAD.items():
            names = ("zero_optimization", old)
            if new == section and self._at(names) is not None:
                said = f'{section}: {{"device": "cpu"}}' if self._at(names) is True else f"no {section}"
                self.notes.append(f"{self._place(names)}: {_said(names, self._at(names))} is understood as {said}")
                return "cpu" if self._at(names) is True else "none"
        names = ("zero_optimization", section, "device")
        if not isinstance(self._at(names[:2]), dict):
            return None
        device = self._at(names)
        if device not in ("cpu", "nvme", "none", AUTO, None):
            self._error(names, f"device takes cpu, nvme or none, not {show(device)}", "write cpu")
            return None
        if device == "nvme":
            folder = (*names[:2], "nvme_path")
            if self._at(folder) in (None, AUTO) and "dist.nvme_path" not in self.given:
                self._error(names, "device nvme needs nvme_path", "write it beside device, or set dist.nvme_path")
            self._take("dist.nvme_path", folder, self._at(folder))
        return None if device in (AUTO, None) else str(device)

    def _read_optimizer(self) -> None:
        betas = self._at(("optimizer", "params", "betas"))
        if isinstance(betas, list) and len(betas) == 2:
            for key, value in zip(("train.adam_beta1", "train.adam_beta2"), betas, strict=True):
                self._take(key, ("optimizer", "params", "betas"), value)
        elif betas not in (None, AUTO):
            self._error(("optimizer", "params", "betas"), "betas takes two numbers", "write [0.9, 0.999] or auto")
        names = ("optimizer", "type")
        kind = self._at(names)
        if kind in (None, AUTO):
            return
        ours = known.OPTIMIZERS.get(str(kind).lower())
        own = self.given.get("train.optim")
        if ours is None:
            self._error(
                names, f"the optimizer {show(kind)} is not offered through this file", "set train.optim, and no type"
            )
        elif own is None or own.origin.value == AUTO or not str(own.origin.value).startswith(ours):
            self._take("train.optim", names, ours)

    def _read_scheduler(self) -> None:
        names = ("scheduler", "type")
        kind = self._at(names)
        if kind in (None, AUTO):
            return
        if kind not in known.SCHEDULERS:
            fix = f"set train.scheduler; this file may say {', '.join(known.SCHEDULERS)}"
            self._error(names, f"the scheduler {show(kind)} is not offered", fix)
            return
        self._take("train.scheduler", names, known.SCHEDULERS[kind])


def _said(names: Names, value: Any) -> str:
    return f"{'.'.join(names)}: {show(value)}"
