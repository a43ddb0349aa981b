"""Seconds of generated answers: the prompt's FLOPs, then a token at a time at the pace of memory or of the host."""

from __future__ import annotations

import math

from sft_play.facts.hardware import Gpu, Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan import rates, state
from sft_play.plan.evaluation_memory import cache_bytes
from sft_play.plan.links import gather_seconds
from sft_play.plan.settings import Method, Settings
from sft_play.plan.sharding import divisors, shards_weights
from sft_play.plan.speed import efficiency_of

# Passes over the keys and values a token: attention reads them, and they are copied to grow by one.
CACHE_PASSES = 3
# Adapters launch that much more kernels a layer.
ADAPTER_LAUNCHES = 1.5


def generation_seconds(
    facts: ModelFacts, settings: Settings, hardware: Hardware, *, rows: int, prompt: float
) -> float | None:
    """Time of one evaluation's answers, each taken to use all of `max_new_tokens`; None where rates are unknown.

    Args:
        rows: rows of the whole evaluation; whole batches of `settings.eval_micro_batch` are dealt to the ranks.
        prompt: mean tokens of a prompt.
    """
    if not hardware.gpus or any(not gpu.flops or not gpu.bandwidth for gpu in hardware.gpus):
        return None
    gpu = min(hardware.gpus, key=lambda one: one.bandwidth)
    rounds = math.ceil(math.ceil(rows / settings.eval_micro_batch) / settings.data_parallel)
    gathered = gather_seconds(facts, settings, hardware)
    token = max(token_seconds(facts, settings, gpu), gathered)
    return rounds * (max(prompt_seconds(facts, settings, gpu, prompt), gathered) + settings.max_new_tokens * token)


def prompt_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu, prompt: float) -> float:
    """One batch of prompts: 2 FLOPs a decoder weight and token; the head works on the last token alone."""
    weights = facts.matmul_parameters - facts.hidden_size * facts.vocab_size
    weights += state.adapter_parameters(facts, settings) if settings.trains_adapter else 0
    flops = 2.0 * weights * settings.eval_micro_batch * prompt / divisors(settings).layer
    return max(flops / (gpu.flops * efficiency_of(gpu).matmul), launch_seconds(facts, settings))


def token_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu) -> float:
    """One more token of every row of a batch: all weights and all keys and values pass through the GPU's memory.

    Small models wait for the host instead, which launches each layer's kernels one by one.
    """
    keys_and_values = CACHE_PASSES * cache_bytes(facts, settings, settings.eval_micro_batch)
    moved = weight_traffic(facts, settings) + keys_and_values
    return max(moved / (gpu.bandwidth * efficiency_of(gpu).bandwidth), launch_seconds(facts, settings))


def weight_traffic(facts: ModelFacts, settings: Settings) -> float:
    """Bytes of weights that one token's pass moves on a GPU.

    4-bit weights of several rows are unpacked first, those of a single one are multiplied as they are (bitsandbytes
    has a kernel for that); fp32 weights are read in the type of the computation, to which autocast cast them.
    """
    packed = state.quantized_weights(facts, settings)
    alone = settings.eval_micro_batch * settings.num_beams == 1
    unpacking = packed * (0.55 if alone else rates.DEQUANTISE_TRAFFIC)
    plain = facts.matmul_parameters - min(packed, facts.matmul_parameters)
    shared = 1 if shards_weights(settings) else divisors(settings).layer
    return (unpacking + plain * settings.compute_dtype.bytes) / shared


def launch_seconds(facts: ModelFacts, settings: Settings) -> float:
    """What the host needs to launch one pass over all layers."""
    more = ADAPTER_LAUNCHES if settings.method is not Method.FULL else 1.0
    return facts.num_layers * rates.LAUNCH_SECONDS_A_LAYER * more
