"""What DoRA costs beside LoRA: peft computes the norm of every adapted, merged weight in every forward pass.

Counted from peft 0.21 (`tuners/lora/dora.py`, `DoraLinearLayer.forward`) and simulated (tests/plan/test_simulation.py).
The speed is counted from its operations too: 1.5 to 2.1 times LoRA's time for 8B, where users measured 1.7 to 2.0
(peft pull requests 1474 and 3341, ms-swift issue 3033).
"""

from __future__ import annotations

from sft_play.facts.hardware import Gpu
from sft_play.facts.shapes import Linear, ModelFacts
from sft_play.plan import rates
from sft_play.plan.settings import Checkpointing, Settings
from sft_play.plan.sharding import divisors
from sft_play.plan.state import adapted_linears

# Bytes moved for each output of an adapted matrix in a forward pass: two scaled copies in fp32, their scaling and sum,
# the sum with the plain output, and its cast.
OUTPUT_TRAFFIC = 42.0
# Bytes moved for each weight (the adapter's product, scaled, added, its norm) and each element of the unit matrix that
# the adapter is multiplied by, in fp32 and cast.
WEIGHT_TRAFFIC = 16.0
UNIT_TRAFFIC = 12.0


def saved_outputs_bytes(facts: ModelFacts, settings: Settings, width: int) -> float:
    """Bytes a token and layer that the magnitude's gradient needs: each matrix' plain output and the adapter's."""
    if not settings.dora:
        return 0.0
    outputs = sum(one.active * one.out_features for one in adapted_linears(facts, settings))
    return 2.0 * outputs * width / facts.num_layers


def weight_norm_bytes(facts: ModelFacts, settings: Settings) -> float:
    """The largest temporary of one norm, with the input of that matrix and its copy in the adapter's type."""
    inputs = settings.adapter_dtype.bytes + settings.compute_dtype.bytes
    largest = max(
        (
            _norm_temporary(one, settings) + settings.tokens * inputs * one.in_features
            for one in adapted_linears(facts, settings)
        ),
        default=0.0,
    )
    return settings.dora * largest / divisors(settings).layer


def _norm_temporary(one: Linear, settings: Settings) -> float:
    """r is small, but the product B A is made as B(A(I)), with I of in x in.

    First I in the adapter's type, its copy for autocast and the product; then that copy, and in the adapter's type the
    product, the weight, the scaled product and the sum.
    """
    width, adapter = settings.compute_dtype.bytes, settings.adapter_dtype.bytes
    cast = width if adapter != width else 0
    making = (adapter + cast) * one.in_features**2 + width * one.weights
    adding = cast * one.in_features**2 + 4 * adapter * one.weights
    return max(making, adding)


def weight_norm_seconds(facts: ModelFacts, settings: Settings, gpu: Gpu, efficiency: rates.Efficiency) -> float:
    """Seconds a micro-batch: every adapted matrix' norm, in the forward pass and again where it is recomputed."""
    if not settings.dora:
        return 0.0
    passes = 1 + (settings.checkpointing is Checkpointing.FULL)
    linears = adapted_linears(facts, settings)
    units = sum(one.active * one.in_features**2 for one in linears)
    weights = sum(one.active * one.weights for one in linears)
    moved = WEIGHT_TRAFFIC * weights + UNIT_TRAFFIC * units
    flops = 2.0 * settings.lora_r * (units + weights)
    return passes * (moved / (gpu.bandwidth * efficiency.bandwidth) + flops / (gpu.flops * efficiency.matmul))


def output_traffic(facts: ModelFacts, settings: Settings) -> float:
    """Bytes moved a token and pass to scale the outputs."""
    if not settings.dora:
        return 0.0
    return OUTPUT_TRAFFIC * sum(one.active * one.out_features for one in adapted_linears(facts, settings))
