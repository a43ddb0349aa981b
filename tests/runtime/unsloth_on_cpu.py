"""Run in unsloth's environment: trains a run.json in unsloth's layers on the CPU, its Triton kernels interpreted.

    python unsloth_on_cpu.py RUN_JSON

A card stands in where unsloth asks for one, and its tables by GPU have one place; all else is as it comes.
"""

# ruff: noqa: E402, I001
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "UNSLOTH_COMPILE_DISABLE": "1"}
import torch

card = SimpleNamespace(name="a card", total_memory=24 * 2**30, major=8, minor=9, multi_processor_count=100)
torch.cuda.get_device_properties = lambda *_: card
torch.cuda.get_device_capability = lambda *_: (8, 9)
torch.cuda.mem_get_info = lambda *_: (20 * 2**30, 24 * 2**30)
torch.cuda.current_device = lambda: 0

import unsloth  # noqa: F401
import unsloth.models.llama as llama


class Cpu(str):
    """A device that also counts as the first place of a table."""

    def __index__(self) -> int:
        return 0


class OnePlace(list):
    """A table by the number of the GPU, which the CPU has none of."""

    def __getitem__(self, number):
        return super().__getitem__(0)

    def __setitem__(self, number, value):
        super().__setitem__(0, value)


llama.get_current_device, llama.DEVICE_TYPE_TORCH, llama.DEVICE_COUNT = (lambda: Cpu("cpu")), "cpu", 1

from transformers import Trainer
import trl

from sft_play.runtime import unsloth as ours, worker
from sft_play.runtime.compiling import decoder_layers
from sft_play.runtime.fused import applied_kernels

UPSTREAM = dict(vars(Trainer))


def load_and_look(config, plan, path, folder, ranks):
    """As the worker does, on the CPU, and see that unsloth is in the model and nowhere else."""
    model = ours.load_unsloth(config, plan, path, folder, SimpleNamespace(local_rank="cpu"))
    assert dict(vars(Trainer)) == UPSTREAM, "the Trainer is not upstream's"
    assert trl.SFTTrainer.__module__ == "trl.trainer.sft_trainer"
    layers = list(decoder_layers(model))
    assert (ours.missing_layers(layers), applied_kernels(model)) == ([], "unsloth")
    lora, names = model.peft_config["default"], [name for name, one in model.named_parameters() if one.requires_grad]
    assert (lora.r, lora.lora_alpha) == (config.tuning.lora.r, config.tuning.lora.alpha)
    assert len(names) == 2 * 7 * len(layers)
    assert all("lora_" in name for name in names)
    for module in model.modules():
        for table in ("multi_gpu_cos_cached", "multi_gpu_sin_cached"):
            if hasattr(module, table):
                setattr(module, table, OnePlace([None]))
    return model


worker.load_unsloth = load_and_look
sys.exit(worker.main(Path(sys.argv[1])))
