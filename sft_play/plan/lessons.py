"""The textbook's lessons on memory as the plan's own numbers: `python -m sft_play.plan.lessons` prints them.

With `--write` the part of docs/memory.md between the two markers is replaced. Gigabytes here are 10^9 bytes, as in
the textbook and on a card's box.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.facts.hardware import parse_hardware
from sft_play.facts.model import facts_from_config, read_model_facts
from sft_play.facts.shapes import Linear, ModelFacts
from sft_play.plan import state
from sft_play.plan.activations import live_layer_bytes, logits_bytes, stored_bytes
from sft_play.plan.build import PlanInputs, choose
from sft_play.plan.layouts import Layout
from sft_play.plan.memory import estimate
from sft_play.plan.settings import Checkpointing, Dtype, Loss, Method, Placement, Settings
from sft_play.plan.sharding import divisors
from sft_play.plan.speed import estimate_speed
from sft_play.plan.strategy import Candidate, fits_memory

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
BEGIN, END = "<!-- lessons: begin, made by python -m sft_play.plan.lessons --write -->", "<!-- lessons: end -->"
GB = 1e9
ZERO_STAGES = (Placement.DDP, Placement.ZERO1, Placement.ZERO2, Placement.ZERO3)
SHARDED = "8xA100-80"


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A row of a guide's table: a model on a machine, the memory a GPU and the speed it promises.

    Attributes:
        gigabytes: a GPU, as the guide writes it.
        tokens_per_second: of the whole machine, as far as the guide says.
        seq_len: that of the preset for such a machine; the guide gives none.
    """

    size: str
    model: str
    hardware: str
    gigabytes: float
    tokens_per_second: float
    seq_len: int


GUIDES = (
    Guide(size="7B", model="Qwen/Qwen2.5-7B-Instruct", hardware="2xRTX4090", gigabytes=18, tokens_per_second=1200,
          seq_len=2048),
    Guide(size="27B", model="google/gemma-3-27b-it", hardware="2xH100-80", gigabytes=65, tokens_per_second=800,
          seq_len=2048),
    Guide(size="70B", model="meta-llama/Llama-3.1-70B", hardware="4xH200", gigabytes=120, tokens_per_second=600,
          seq_len=4096),
)  # fmt: skip


def textbook_model(parameters: int) -> ModelFacts:
    """A model of so many parameters and nothing else: all of them one matrix, no vocabulary."""
    matrix = Linear(name="all", in_features=parameters, out_features=1, count=1, active=1)
    return ModelFacts(
        name="textbook", model_type="textbook", hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=1, vocab_size=0, tied=False, max_positions=1, gated_mlp=True, layer_norm=False,
        linears=(matrix,), embedding_parameters=0, head_parameters=0, norm_parameters=0,
    )  # fmt: skip


def state_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Weights, gradients and optimizer state on one GPU, without activations and buffers."""
    share = divisors(settings)
    weights = state.decoder_weight_bytes(facts, settings) + state.outer_weight_bytes(facts, settings)
    return (
        weights / share.weights
        + state.gradient_bytes(facts, settings) / share.gradients
        + state.optimizer_bytes(facts, settings) / share.optimizer
    )


def full_tuning(placement: Placement, gpus: int, *, mixed: bool) -> Settings:
    """AdamW on all weights: all in fp32, or 16-bit weights and gradients with fp32 master copies (DeepSpeed)."""
    return Settings(
        method=Method.FULL,
        micro_batch=1,
        seq_len=1,
        param_dtype=Dtype.BF16 if mixed else Dtype.FP32,
        compute_dtype=Dtype.BF16 if mixed else Dtype.FP32,
        master_weights=mixed,
        placement=placement,
        gpus=gpus,
    )


def seven_billion_lesson() -> list[str]:
    """7B, fp32, Adam: 112 GB; and what ZeRO makes of it on two GPUs."""
    facts = textbook_model(7_000_000_000)
    plain = full_tuning(Placement.SINGLE, 1, mixed=False)
    parts = (
        state.decoder_weight_bytes(facts, plain),
        float(state.gradient_bytes(facts, plain)),
        state.optimizer_bytes(facts, plain),
    )
    weights, gradients, moments = (f"{part / GB:.0f}" for part in parts)
    two = [f"{state_bytes(facts, full_tuning(one, 2, mixed=False)) / GB:.0f} GB" for one in ZERO_STAGES]
    return [
        "### 7B in fp32 with Adam",
        "",
        f"Weights {weights} GB, gradients {gradients} GB, Adam's two moments {moments} GB: "
        f"{sum(parts) / GB:.0f} GB, before any activation.",
        "",
        *_table(["on 2 GPUs", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"], [["each GPU holds", *two]]),
        "",
        "Two GPUs halve what is sharded and nothing else. Where 84, 56 and 28 are taught, ZeRO-2 and ZeRO-3 are wrong.",
    ]


def zero_factors_lesson() -> list[str]:
    """The 4x and 8x of ZeRO-1 and ZeRO-2: only with master weights and only for many GPUs."""
    facts = textbook_model(7_000_000_000)
    rows = []
    for name, mixed in (("mixed precision, 16 bytes", True), ("all fp32, 16 bytes", False)):
        for gpus in (2, 8, 64, 1024):
            whole = state_bytes(facts, full_tuning(Placement.DDP, gpus, mixed=mixed))
            less = [whole / state_bytes(facts, full_tuning(one, gpus, mixed=mixed)) for one in ZERO_STAGES[1:]]
            rows.append([name, str(gpus), *(f"{one:.1f}x" for one in less)])
    return [
        "### The 4x and 8x of ZeRO",
        "",
        *_table(["state of a parameter", "GPUs", "ZeRO-1", "ZeRO-2", "ZeRO-3"], rows),
        "",
        "ZeRO-1 tends to 4x and ZeRO-2 to 8x where 12 of 16 bytes are optimizer state and GPUs are many. In plain fp32",
        "the same stages tend to 2x and 4x, and on two GPUs nothing reaches either.",
    ]


def activations_lesson() -> list[str]:
    """Activations are the same on every GPU, whatever ZeRO shards."""
    facts = read_model_facts("mistralai/Mistral-7B-v0.1")
    rows = []
    for placement, gpus in ((Placement.DDP, 8), (Placement.ZERO2, 8), (Placement.ZERO3, 8), (Placement.ZERO3, 64)):
        one = replace(full_tuning(placement, gpus, mixed=True), micro_batch=4, seq_len=4096, loss=Loss.FULL)
        held = (stored_bytes(facts, one), live_layer_bytes(facts, one), logits_bytes(facts, one))
        sizes = [f"{size / GB:.1f}" for size in (state_bytes(facts, one), *held)]
        rows.append([f"{placement.value} on {gpus}", *sizes])
    return [
        "### ZeRO does not shard activations",
        "",
        "Mistral-7B, full, mixed precision, 4 x 4,096 tokens a GPU, checkpointing, whole logits; GB on each GPU:",
        "",
        *_table(["strategy", "weights, gradients, state", "checkpoints", "layer at work", "logits"], rows),
        "",
        "Checkpoints wait beside the larger of layer and logits. Only a smaller micro-batch, checkpointing, a chunked",
        "loss or tensor parallelism makes them smaller.",
    ]


def decoder(layers: int, hidden: int, inner: int) -> ModelFacts:
    """A llama of these shapes with T5's vocabulary."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128, "vocab_size": 32128,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
    }  # fmt: skip
    return facts_from_config(config, name="decoder")


def ddp_or_fsdp_lesson() -> list[str]:
    """DDP and FSDP are as fast while both fit; DDP stops fitting first."""
    hardware, rows = parse_hardware(SHARDED), []
    for name, shape in (("611M", (32, 1024, 4160)), ("2.28B", (32, 2048, 8192)), ("11.3B", (41, 4096, 16384))):
        facts = decoder(*shape)
        for placement in (Placement.DDP, Placement.FSDP):
            one = Settings(
                method=Method.FULL, micro_batch=8, seq_len=2048, param_dtype=Dtype.BF16, fsdp2=True,
                checkpointing=Checkpointing.FULL, placement=placement, gpus=hardware.world_size,
            )  # fmt: skip
            memory, speed = estimate(facts, one), estimate_speed(facts, one, hardware)
            fits = fits_memory(memory, hardware)
            rate = f"{speed.tokens_per_second:,.0f}" if speed and fits else "-"
            found = ["yes" if fits else "no", rate]
            rows.append([name, placement.value, f"{memory.needed_bytes / GB:.0f} GB", *found])
    return [
        "### DDP or FSDP",
        "",
        f"Full fine-tuning of decoders of these sizes on {SHARDED}, bf16 weights and Adam, 8 x 2,048 tokens a GPU,",
        "checkpointing, chunked loss:",
        "",
        *_table(["model", "strategy", "needs a GPU", "fits", "tokens/s, all GPUs"], rows),
        "",
        "One guide reports 611M and 2.28B equally fast under both and 11.3B under FSDP only. Its settings are not",
        "known here: an agreement in kind, not in tokens a second.",
    ]


def guide_candidates(guide: Guide) -> tuple[Candidate | None, Candidate]:
    """(what the plan takes by itself for QLoRA, the same layout at its least memory)."""
    hardware = parse_hardware(guide.hardware)
    config = Config.model_validate(
        {
            "model": {"name": guide.model, "max_seq_len": guide.seq_len},
            "tuning": {"mode": "qlora"},
            "data": {"train": "not read"},
        }
    )
    inputs = PlanInputs(config=config, hardware=hardware, facts=read_model_facts(guide.model))
    chosen = choose(inputs).chosen
    layout = chosen.layout if chosen else Layout(placement=Placement.DDP)
    smallest = config.train.model_copy(update={"batch_size": 1, "gradient_checkpointing": True})
    least = choose(replace(inputs, config=config.model_copy(update={"train": smallest}), only=[layout])).candidates[0]
    return chosen, least


def guides_lesson() -> list[str]:
    """The plan's figures beside a guide's."""
    rows = []
    for guide in GUIDES:
        chosen, least = guide_candidates(guide)
        rows.append([f"{guide.size} on {guide.hardware}", "the guide", "-", f"{guide.gigabytes:.0f}",
                     f"{guide.tokens_per_second:,.0f}"])  # fmt: skip
        rows += [_guide_row(guide, one) for one in (least, chosen) if one is not None]
    return [
        "### A guide's table",
        "",
        "Its rows name a size, a machine, memory and tokens a second, and neither method, batch nor length. Here:",
        "QLoRA, rank 16 on all linear layers, 2,048 tokens (70B: 4,096); first the least memory, one row a GPU and",
        "checkpointing on, then what the plan takes by itself. GB are what each GPU would show; tokens a second are",
        "those of the whole machine.",
        "",
        *_table(["", "figures", "strategy, micro-batch, checkpointing", "GB a GPU", "tokens/s"], rows),
        "",
        "The plan expects several times the guide's speed, and nobody has measured either on these machines for this",
        "page. QLoRA's memory is held against published runs on one GPU; DDP is not validated.",
    ]


def _guide_row(guide: Guide, candidate: Candidate) -> list[str]:
    settings = candidate.settings
    checkpointing = "on" if settings.checkpointing is Checkpointing.FULL else "off"
    capacity = parse_hardware(guide.hardware).smallest_gpu_bytes
    shown = candidate.memory.shown_device_bytes(capacity) / GB
    layout = f"{candidate.layout.name}, {settings.micro_batch}, {checkpointing}"
    return ["", "the plan", layout, f"{shown:.0f}", f"{candidate.tokens_per_second:,.0f}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def render_lessons() -> str:
    """The generated part of docs/memory.md, without the markers."""
    lessons = (
        seven_billion_lesson, zero_factors_lesson, activations_lesson, ddp_or_fsdp_lesson, guides_lesson,
    )  # fmt: skip
    return "\n\n".join("\n".join(lesson()) for lesson in lessons)


def with_lessons(page: str) -> str:
    """The page with its generated part replaced.

    Raises:
        ValueError: a marker is missing.
    """
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"the page lacks {BEGIN if not found else END!r}")
    return f"{before}{BEGIN}\n\n{render_lessons()}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The lessons of docs/memory.md, from the plan.")
    parser.add_argument("--write", action="store_true", help="put them into docs/memory.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(with_lessons(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(render_lessons() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
