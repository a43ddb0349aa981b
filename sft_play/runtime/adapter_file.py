"""A LoRA adapter as it lies on disk, and what it makes of each weight of its base."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from sft_play.errors import ModelError
from sft_play.report.read import read_object

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
# How peft names the tensors of one module, old DoRA files included.
PARTS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
    ".base_layer.weight": "base",
}
# Options that are honoured here, or that do not change what the adapter computes.
UNDERSTOOD = (
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "task_type", "peft_type",
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "megatron_core",
    "runtime_config", "qalora_group_size", "eva_config",
)  # fmt: skip
# Starts that leave the base's weights as they were; others (pissa, olora, corda, loftq) move part of them.
STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Adapter:
    """An adapter that is understood as a whole.

    Attributes:
        lora: module -> part (A, B, magnitude, ...) -> tensor.
        whole: weight -> the tensor that takes its place.
    """

    folder: Path
    config: Any
    lora: dict[str, dict[str, str]]
    whole: dict[str, str]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the file, read now."""
        with safe_open(str(self.folder / WEIGHTS), framework="pt") as file:
            return file.get_tensor(name)

    def changes(self, weight: str) -> bool:
        """Whether the adapter makes something else of a weight."""
        return weight in self.whole or weight.removesuffix(".weight") in self.lora

    def rows_of(self, weight: str) -> int | None:
        """First dimension of what takes a weight's place; None where nothing does."""
        if weight not in self.whole:
            return None
        with safe_open(str(self.folder / WEIGHTS), framework="pt") as file:
            return int(file.get_slice(self.whole[weight]).get_shape()[0])

    def applied(self, weight: str, base: torch.Tensor) -> torch.Tensor:
        """The weight with the adapter in it, in fp32 where it was computed.

        Raises:
            ModelError: shapes do not fit.
        """
        if weight in self.whole:
            return self.tensor(self.whole[weight])
        module = weight.removesuffix(".weight")
        if module not in self.lora:
            return base
        parts = {part: self.tensor(name).float() for part, name in self.lora[module].items()}
        if "base" in parts and not torch.equal(parts["base"], base.float()):  # peft adds embeddings that LoRA is on
            fix = "name the base that it was trained on"
            raise ModelError(
                "the adapter's copy of the base's weight differs", where=f"{self.folder}: {module}", fix=fix
            )
        embedding = "embedding_A" in parts
        down, up = (parts[f"embedding_{one}" if embedding else one] for one in ("A", "B"))
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            what = f"A {tuple(down.shape)} and B {tuple(up.shape)} are no pair of matrices"
            raise ModelError(what, where=f"{self.folder}: {module}", fix="take a good copy of the adapter")
        delta = (up @ down).T if embedding else up @ down
        if delta.shape != base.shape:
            what = f"the adapter's matrices give {tuple(delta.shape)}, the base has {tuple(base.shape)}"
            raise ModelError(what, where=f"{self.folder}: {module}", fix="name the base that it was trained on")
        result = base.float() + self.scale(module, down.shape[0]) * delta
        if "magnitude" in parts:
            result *= (parts["magnitude"].flatten() / torch.linalg.norm(result, dim=1)).unsqueeze(1)
        return result

    def scale(self, module: str, rank: int) -> float:
        """What the product of the two matrices is multiplied by: alpha / r, under rsLoRA alpha / sqrt(r).

        Raises:
            ModelError: the file's rank is not the settings'.
        """
        ranks, alphas = self.config.rank_pattern, self.config.alpha_pattern
        said = ranks.get(get_pattern_key(ranks, module), self.config.r)
        if said != rank:
            raise ModelError(f"rank {rank} in the file, {said} in {SETTINGS}", where=f"{self.folder}: {module}")
        alpha = float(alphas.get(get_pattern_key(alphas, module), self.config.lora_alpha))
        return alpha / (math.sqrt(rank) if self.config.use_rslora else rank)


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder.

    Raises:
        ModelError: it is none, or has an option or a tensor that is not understood; each is named.
    """
    settings = read_object(folder / SETTINGS)
    if not settings:
        raise ModelError(f"{SETTINGS} is missing or no JSON", where=str(folder), fix="give ADAPTER=runs/NAME/adapter")
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        fix = "save it as safetensors with peft's save_pretrained" if pickled else "give ADAPTER=runs/NAME/adapter"
        raise ModelError(f"{WEIGHTS} is missing", where=str(folder), fix=fix)
    refuse_options(settings, folder)
    refuse_values(settings, folder)
    known = {field.name for field in fields(LoraConfig)}
    config = LoraConfig(**{name: value for name, value in settings.items() if name in known & set(UNDERSTOOD)})
    lora: dict[str, dict[str, str]] = defaultdict(dict)
    whole: dict[str, str] = {}
    for name in names_in(folder / WEIGHTS):
        weight = name.removeprefix(PREFIX)
        suffix = next((one for one in PARTS if weight.endswith(one)), None)
        if suffix:
            lora[weight.removesuffix(suffix)][PARTS[suffix]] = name
        else:
            whole[weight] = name
    found = Adapter(folder, config, dict(lora), whole)
    refuse_tensors(found)
    return found


def refuse_options(settings: dict[str, Any], folder: Path) -> None:
    """Anything but plain LoRA, rsLoRA and DoRA.

    Raises:
        ModelError: naming the option.
    """
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"peft_type {settings.get('peft_type')} cannot be merged, only LORA", where=str(folder))
    plain = LoraConfig()
    for name, value in settings.items():
        if name == "init_lora_weights":
            strange = value not in STARTS
        else:
            strange = name not in UNDERSTOOD and bool(value) and value != getattr(plain, name, None)
        if strange:
            what = f"{name}: {str(value)[:60]} is not understood here"
            raise ModelError(what, where=str(folder / SETTINGS), fix="merge it with peft's merge_and_unload")


def names_in(file: Path) -> list[str]:
    """The tensors of a file.

    Raises:
        ModelError: it is damaged.
    """
    try:
        with safe_open(str(file), framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        fix = "take a good copy of it, or train again"
        raise ModelError(f"cannot be read ({str(error)[:80]})", where=str(file), fix=fix) from error


def refuse_values(settings: dict[str, Any], folder: Path) -> None:
    """Settings that the scale is computed from, and those that name modules.

    Raises:
        ModelError: naming the one whose value cannot be.
    """
    wrong = [name for name in ("r", "lora_alpha") if not is_number(settings.get(name, 1))]
    for name in ("rank_pattern", "alpha_pattern"):
        values = settings.get(name) or {}
        if not isinstance(values, dict) or not all(is_pattern(key) and is_number(one) for key, one in values.items()):
            wrong.append(name)
    for name in ("target_modules", "modules_to_save", "exclude_modules"):
        if not isinstance(settings.get(name) or "", (str, list)):
            wrong.append(name)
    if wrong:
        what = f"{wrong[0]}: {str(settings[wrong[0]])[:60]} is no value for it"
        raise ModelError(what, where=str(folder / SETTINGS), fix="take the file that the training wrote")


def is_number(value: Any) -> bool:
    """Whether a rank or an alpha can be that."""
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def is_pattern(text: str) -> bool:
    """Whether a module's name or expression can be matched with."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def refuse_tensors(adapter: Adapter) -> None:
    """Half a pair, magnitudes without DoRA, and tensors of unknown kinds.

    Raises:
        ModelError: naming the module or the tensor.
    """
    allowed: list[set[str]] = [{"A", "B", "magnitude"}] if adapter.config.use_dora else [
        {"A", "B"}, {"embedding_A", "embedding_B"},
    ]  # fmt: skip
    for module, parts in adapter.lora.items():
        if set(parts) - {"base"} not in allowed:
            raise ModelError(f"{module} has {', '.join(sorted(parts))} only", where=str(adapter.folder / WEIGHTS))
    strange = [name for name in adapter.whole if "lora_" in name or "token_adapter" in name]
    if strange or not (adapter.lora or adapter.whole):
        what = f"{strange[0]} is not understood here" if strange else "holds no tensors"
        raise ModelError(what, where=str(adapter.folder / WEIGHTS), fix="merge it with peft's merge_and_unload")
