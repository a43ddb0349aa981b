"""`python -m sft_play.runtime.export_check FOLDER`: load a model folder as anybody would, and let it answer once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.errors import ResultDiffersError

QUESTION = "Say something."
TOKENS = 8


def load_elsewhere(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """What a fresh process found: parameters, type, and the first tokens of an answer.

    Raises:
        ResultDiffersError: the folder cannot be loaded, or lacks weights.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(int(trust_remote_code))]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ResultDiffersError(f"cannot be loaded by transformers ({said[:300]})", where=str(folder))
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["missing"]:
        raise ResultDiffersError(f"lacks weights, first {found['missing'][0]}", where=str(folder))
    return found


def main(folder: Path, *, trust_remote_code: bool) -> None:
    """Print what was found as one JSON object."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    own: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **own)
    tokenizer = AutoTokenizer.from_pretrained(folder, **own)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    else:
        ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    found = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "missing": sorted(str(key) for key in report["missing_keys"]),
        "answer": tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), trust_remote_code=sys.argv[2] == "1")
