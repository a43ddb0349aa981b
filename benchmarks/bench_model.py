"""The files that a case of `make bench` trains on: random weights of its shape, a small tokenizer, made-up rows.

    python -m benchmarks.bench_model CASE FOLDER

Speed and memory depend on shapes and lengths, not on what the weights know. Rows of plain cases are longer than the
case's length and cut to it, so that nothing is padded; those of packed cases are an eighth to all of it.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

from benchmarks.bench_cases import BenchCase, case_named
from tests.data.tokenizers_made import make_tokenizer

MOST_STEPS = 64
SHARD = "4GB"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "auto": "bfloat16"}


def make_model(case: BenchCase, folder: Path) -> None:
    """Weights in `folder`, built on the GPU where there is one: filling billions on a CPU takes minutes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = case.model_config()
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, DTYPES[case.dtype]))
    model.save_pretrained(folder, max_shard_size=SHARD)


def write_rows(case: BenchCase, file: Path) -> None:
    """Rows of random letters, about a token each, as many as the longest run of this case can take."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(MOST_STEPS * case.micro_batch * (2 if case.packing else 1)):
            length = draw.randint(case.seq_len // 8, case.seq_len) if case.packing else 2 * case.seq_len
            stream.write(json.dumps({"text": "".join(draw.choices(string.ascii_lowercase, k=length))}) + "\n")


def main(name: str, folder: Path) -> int:
    """Make what is not there yet: cases of one shape share its weights."""
    case = case_named(name)
    model = folder / case.model_key
    if not model.exists():
        make_tokenizer("chatml", folder).rename(model)
        make_model(case, model)
    write_rows(case, folder / f"{case.name}.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
