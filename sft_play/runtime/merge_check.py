"""Compare a merged model with base and adapter on rows, each loaded in a fresh process, never two at once.

    python -m sft_play.runtime.merge_check SPEC.json

writes the logits of the rows, or, where the other's are there, compares with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sft_play.errors import ResultDiffersError
from sft_play.runtime.model import DTYPES, keep_layout

# Largest difference of two logits, as a share of the largest logit. In 16 bits merged weights are rounded once more
# than base and adapter apart, and so is every activation after them: a 135M model in bf16 came to 0.035.
BOUNDS = {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.02}
# So wide a bound would let an adapter pass that is not there: the mean difference must also be well below what the
# adapter does, or as small as 16 bits are.
EFFECT_SHARE, NOISE = 0.5, 0.01
LARGEST, MEAN, AGREE, SCALE, POSITIONS = "largest", "mean", "top1_agreement", "largest_logit", "positions"
EFFECT = "mean_effect_of_adapter"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
        dtype: in which both are computed.
        bound: share of the largest logit by which two may differ.
        quantization: bitsandbytes' settings of a base that was trained over in 4 bits; what the merged model differs
            from that one is measured too, and not judged.
    """

    base: Path
    adapter: Path
    rows: Sequence[Sequence[int]]
    dtype: str
    bound: float
    trust_remote_code: bool
    quantization: dict[str, Any] | None = None


def compare(comparison: Comparison, merged: Path) -> dict[str, Any]:
    """The figures of the comparison: largest and mean difference of logits, share of positions whose top token agrees.

    Raises:
        ResultDiffersError: the bound is passed, or a process failed.
    """
    with tempfile.TemporaryDirectory(prefix=".check-", dir=merged.parent) as place:
        spec = {
            "rows": [list(row) for row in comparison.rows],
            "dtype": comparison.dtype,
            "trust_remote_code": comparison.trust_remote_code,
            "logits": f"{place}/logits.safetensors",
            "figures": f"{place}/figures.json",
            "quantization": None,
        }
        apart = {**spec, "model": str(comparison.base), "adapter": str(comparison.adapter)}
        _run(apart, Path(place))
        figures = _run({**spec, "model": str(merged), "adapter": None}, Path(place))
        if comparison.quantization is not None:
            try:
                over = _run({**apart, "quantization": comparison.quantization}, Path(place))
                figures |= {"mean_of_4_bits": over[MEAN], "agreement_of_4_bits": over[AGREE]}
            except ResultDiffersError:  # a machine without 4-bit kernels can merge all the same, and is told so
                figures["no_4_bits"] = True
    figures |= {"dtype": comparison.dtype, "bound": comparison.bound}
    judge(figures)
    return figures


def judge(figures: dict[str, Any]) -> None:
    """Raises: ResultDiffersError: the figures pass their bound, or no adapter would explain them."""
    scale = max(1.0, figures[SCALE])
    share = figures[LARGEST] / scale
    where = f"the merged model on {figures[POSITIONS]} positions in {figures['dtype']}"
    if not share <= figures["bound"]:
        what = f"logits differ by {figures[LARGEST]:.3g} at most, {share:.2g} of the largest one"
        raise ResultDiffersError(f"{what}; the bound is {figures['bound']:g}; it was removed", where=where)
    if not figures[MEAN] <= max(EFFECT_SHARE * figures[EFFECT], NOISE * scale):
        what = (
            f"logits differ by {figures[MEAN]:.3g} in the mean, where the adapter moves them by {figures[EFFECT]:.3g}"
        )
        raise ResultDiffersError(f"{what}; it was removed", where=where)


def _run(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    file = place / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", __name__, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        fix = "name the base that the adapter was trained on; transformers has to load both"
        raise ResultDiffersError(f"could not be loaded or computed ({said[:300]})", where=spec["model"], fix=fix)
    figures = Path(spec["figures"])
    return dict(json.loads(figures.read_text(encoding="utf-8"))) if figures.is_file() else {}


def main(file: Path) -> None:
    """One side of the comparison."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    spec = json.loads(file.read_text(encoding="utf-8"))
    model = load(spec)
    logits = [logits_of(model, row) for row in spec["rows"]]
    if spec["adapter"] and not spec["quantization"]:
        with model.disable_adapter():
            effects = [
                (logits_of(model, row) - one).abs().mean() for row, one in zip(spec["rows"], logits, strict=True)
            ]
        stored = {str(number): one for number, one in enumerate(logits)}
        save_file({**stored, "effect": torch.stack(effects)}, spec["logits"])
        return
    Path(spec["figures"]).write_text(json.dumps(figures_of(logits, spec["logits"])), encoding="utf-8")


def load(spec: dict[str, Any]) -> Any:
    """The model of one side, its embedding resized where the adapter brings more tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"],
        dtype=DTYPES[spec["dtype"]],
        quantization_config=BitsAndBytesConfig.from_dict(spec["quantization"]) if spec["quantization"] else None,
        device_map="auto" if torch.cuda.is_available() else None,
        trust_remote_code=spec["trust_remote_code"],
        local_files_only=True,
    )
    if spec["adapter"]:
        rows = rows_of_adapter(Path(spec["adapter"]), model)
        if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)
        keep_layout(model)
        model = PeftModel.from_pretrained(model, spec["adapter"])
    return model.eval()


def rows_of_adapter(adapter: Path, model: Any) -> int | None:
    """Rows of the embedding in the adapter's file; None where it has none."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    with safe_open(str(adapter / "adapter_model.safetensors"), framework="pt") as weights:
        names = list(weights.keys())
        found = [key for key in names if key.endswith((f"{name}.weight", f"{name}.base_layer.weight"))]
        return int(weights.get_slice(found[0]).get_shape()[0]) if found else None


def logits_of(model: Any, row: list[int]) -> torch.Tensor:
    """Logits of one row in fp32 on the CPU, shape (tokens, vocabulary)."""
    ids = torch.tensor([row], device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return result


def figures_of(logits: list[torch.Tensor], stored: str) -> dict[str, Any]:
    """How far logits are from the stored ones."""
    with safe_open(stored, framework="pt") as file:
        others = [file.get_tensor(str(number)) for number in range(len(logits))]
        effect = file.get_tensor("effect").mean().item()
    differences = [(one - other).abs() for one, other in zip(logits, others, strict=True)]
    agree = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in zip(logits, others, strict=True)])
    return {
        LARGEST: max(one.max().item() for one in differences),
        MEAN: torch.stack([one.mean() for one in differences]).mean().item(),
        AGREE: agree.float().mean().item(),
        SCALE: max(one.abs().max().item() for one in others),
        EFFECT: effect,
        POSITIONS: len(agree),
        "rows": len(logits),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
