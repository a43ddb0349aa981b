"""The finished model: whole, loadable by a fresh process without this package, and the one that was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.runs import CASES, SINGLE, run_case
from tests.tiny import Workplace

# Run where this package cannot be imported: what any user of the result does.
LOAD = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

base, result, checkpoint = sys.argv[1:]
rows = [{"role": "user", "content": "What comes after 7?"}]
if result.endswith("adapter"):
    from peft import PeftModel
    bases = [AutoModelForCausalLM.from_pretrained(base) for _ in range(2)]
    models = [PeftModel.from_pretrained(*pair) for pair in zip(bases, (result, checkpoint))]
else:
    models = [AutoModelForCausalLM.from_pretrained(one) for one in (result, checkpoint)]
tokenizer = AutoTokenizer.from_pretrained(result)
text = tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
plain = AutoModelForCausalLM.from_pretrained(base)
ours, theirs, before = (model(ids).logits for model in (*models, plain))
(file,) = __import__("pathlib").Path(result).glob("*.safetensors")
weights = load_file(file)
print(json.dumps({
    "as_checkpoint": (ours - theirs).abs().max().item(),
    "as_base": (ours - before).abs().max().item(),
    "empty": [name for name, weight in weights.items() if weight.numel() == 0],
    "unchanged": [name for name, weight in weights.items() if "lora_B" in name and not weight.any()],
    "template": bool(tokenizer.chat_template),
    "stops": models[0].generation_config.eos_token_id,
    "eos": tokenizer.eos_token_id,
}))
"""


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("lora", "single"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("full", "single"), ("full", "fsdp"), ("lora", "fsdp"), ("lora", "zero3"), ("full", "zero3"))
        ),
    ],
)
def test_a_fresh_process_loads_what_was_trained(workplace: Workplace, method: str, layout: str) -> None:
    saving = {"TRAIN_SAVE_STRATEGY": "steps", "TRAIN_SAVE_STEPS": "3", "TRAIN_MAX_STEPS": "3"}
    done = run_case(workplace, method, {"single": SINGLE, **CASES}[layout], "made", **saving)
    assert done.code == 0, done.out[-1500:] + done.err
    run = workplace.path / "runs/made"
    result = run / ("adapter" if method == "lora" else "model")
    environ = {key: value for key, value in workplace.environ().items() if key != "PYTHONPATH"}
    read = subprocess.run(
        [sys.executable, "-c", LOAD, str(workplace.model), str(result), str(run / "checkpoints/step-3")],
        env=environ, cwd=workplace.path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    assert found["as_checkpoint"] < 1e-5
    assert found["as_base"] > 1e-4
    assert found["empty"] == found["unchanged"] == []
    assert found["template"]
    assert found["eos"] in (found["stops"] if isinstance(found["stops"], list) else [found["stops"]])
    names = {file.name for file in Path(result).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
