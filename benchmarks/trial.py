"""One case in one process: build the model with random weights, train a few steps, write what was measured.

    python benchmarks/trial.py CASE STEPS RESULT.json

Model, adapter, trainer and arguments are the product's own (`sft_play.runtime`); only the weights are made here, a
matrix at a time, so that a 4-bit model never exists in 16 bits and nothing is downloaded.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import bitsandbytes  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import init_empty_weights  # noqa: E402
from cases import Case, case_named  # noqa: E402
from datasets import Dataset  # noqa: E402
from measure import probe_device  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from transformers.quantizers import AutoHfQuantizer  # noqa: E402

from sft_play.config.schema import Config  # noqa: E402
from sft_play.plan.build import Plan, PlanInputs, plan_of  # noqa: E402
from sft_play.record.run_dir import RunDir  # noqa: E402
from sft_play.runtime.adapters import add_adapter  # noqa: E402
from sft_play.runtime.applied import check_applied  # noqa: E402
from sft_play.runtime.arguments import build_arguments  # noqa: E402
from sft_play.runtime.model import DTYPES, keep_layout, quantization  # noqa: E402
from sft_play.runtime.trainer import SftPlayTrainer  # noqa: E402

# Steps before the clock: the first makes the optimizer state, and kernels are compiled and chosen in it.
WARM_UP_STEPS = 2
# cuBLAS and kernels of other libraries say it in a plain RuntimeError.
OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
PR_SET_PDEATHSIG = 1


class Clock(TrainerCallback):
    """Seconds of the steps after the warm-up, the device's work included."""

    def __init__(self) -> None:
        self.started = self.ended = 0.0
        self.timed_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ended = time.perf_counter()
        if state.global_step == WARM_UP_STEPS:
            self.started = self.ended
        elif state.global_step > WARM_UP_STEPS:
            self.timed_steps += 1


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Figures of one case, for the row; bytes as bytes."""
    hardware = probe_device(torch_device)
    config = case.config(steps=steps)
    inputs = PlanInputs(config=config, hardware=hardware, facts=case.facts())
    plan = plan_of(inputs, case.candidate(hardware, steps=steps))
    before = _start_counting(plan)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_run(case, config, plan, RunDir(Path(folder)))
        clock = Clock()
        trainer.add_callback(clock)
        check_applied(trainer, config, plan)
        built = time.perf_counter() - started
        if plan.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    tokens = case.micro_batch * case.seq_len * clock.timed_steps
    return {
        "outcome": "ok",
        "tokens_per_second": tokens / (clock.ended - clock.started),
        "build_seconds": built,
        "loss": next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry),
        **_memory(plan, before),
    }


def torch_device() -> str:
    """The GPU as `measure.TORCH_DEVICE` prints it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    seen = torch.cuda.get_device_properties(0)
    return "\t".join(map(str, (seen.name, torch.cuda.mem_get_info(0)[1], seen.major, seen.minor)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the machine had no more memory to give."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def build_run(case: Case, config: Config, plan: Plan, run: RunDir) -> SftPlayTrainer:
    """The product's trainer on a random model and rows of exactly the case's length."""
    torch.manual_seed(config.train.seed)
    model = random_model(case, config, plan)
    if case.method != "full":
        model = add_adapter(model, config)
    vocabulary = case.facts().vocab_size
    rows = torch.randint(3, vocabulary, (case.micro_batch * (config.train.max_steps or 1), case.seq_len)).tolist()
    return SftPlayTrainer(
        run,
        {},
        model=model,
        args=build_arguments(config, plan, run, has_validation=False),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=made_up_tokenizer(),
    )


def made_up_tokenizer() -> PreTrainedTokenizerFast:
    """The trainer asks one for its padding token; no text is ever tokenised."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def random_model(case: Case, config: Config, plan: Plan) -> Any:
    """The architecture on the plan's device: normal matrices of standard deviation 0.02, norms at their start."""
    values = {key: value for key, value in case.model_config().items() if key != "model_type"}
    shape = AutoConfig.for_model(case.model_config()["model_type"], **values)
    shape._attn_implementation = plan.attention
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(shape, dtype=DTYPES[plan.dtype])
    model.tie_weights()
    if case.method == "qlora":
        _quantise(model, config, plan)
    _fill(model, plan.device)
    return model


def _quantise(model: Any, config: Config, plan: Plan) -> None:
    """bitsandbytes layers for the decoder's matrices, each packed as soon as it is made; flags as from_pretrained's."""
    head = model.get_output_embeddings()
    settings = quantization(config, plan)
    assert settings is not None
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear) and child is not head:
                setattr(module, name, _four_bit(child, config, plan))
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = settings.quant_method
    model.config.quantization_config = settings
    model.hf_quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    keep_layout(model)


def _four_bit(linear: torch.nn.Linear, config: Config, plan: Plan) -> bitsandbytes.nn.Linear4bit:
    kind = config.tuning.quantization
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=DTYPES[plan.autocast],
        compress_statistics=kind.double,
        quant_type=kind.type,
        device="meta",
    )
    values = torch.empty(linear.weight.shape, dtype=DTYPES[plan.dtype], device=plan.device).normal_(std=0.02)
    made.weight = bitsandbytes.nn.Params4bit(
        values, requires_grad=False, compress_statistics=kind.double, quant_type=kind.type, module=made
    ).to(plan.device)
    if linear.bias is not None:
        made.bias = torch.nn.Parameter(torch.empty_like(linear.bias, device="meta"), requires_grad=False)
    return made


def _fill(model: torch.nn.Module, device: str) -> None:
    """Every parameter still on the meta device gets memory and values, ties kept; buffers move to the device."""
    made: dict[int, torch.nn.Parameter] = {}
    kept = list(model.parameters())  # alive to the end, so that no id is given twice
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.device.type == "meta":
                if id(weight) not in made:
                    made[id(weight)] = torch.nn.Parameter(_values(name, weight, device), weight.requires_grad)
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    del kept


def _values(name: str, weight: torch.Tensor, device: str) -> torch.Tensor:
    values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    if weight.dim() > 1:
        return values.normal_(std=0.02)
    return values.zero_() if name == "bias" else values.fill_(1.0)


def _start_counting(plan: Plan) -> int:
    """Resident bytes before the model, its high-water mark started anew; 0 on a GPU, where torch counts."""
    if plan.device == "cuda":
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _status_bytes("VmHWM")
    return _status_bytes("VmRSS")


def _memory(plan: Plan, before: int) -> dict[str, int]:
    """Peaks in bytes; on a CPU what the resident set grew by beyond the imported libraries.

    `device_bytes` is all that is taken on the GPU, as nvidia-smi shows it, other processes included.
    """
    if plan.device == "cpu":
        return {"resident_growth_bytes": _status_bytes("VmHWM") - before}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
    }


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def main(name: str, steps: int, result: Path) -> int:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    try:
        found = measure(case_named(name), steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = {"outcome": "oom", "error": (str(error).splitlines() or ["out of memory"])[0]}
    result.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.platform == "linux":  # a measuring program that was killed must leave no case on the GPU
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
