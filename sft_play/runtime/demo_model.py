"""The demo's model as an ordinary model folder: SmolLM2-135M-Instruct, from the GGUF file of its package."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(gguf: Path, target: Path) -> None:
    """Dequantise a GGUF file into safetensors (bf16), tokenizer and chat template, complete or not at all."""
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain floats from here on; with these left in place save_pretrained refuses.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config.name_or_path = target.name
    staging = target.with_name(f".{target.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
