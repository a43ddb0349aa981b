"""What ZeRO-3 keeps on a fast disk instead of in host memory (ZeRO-Infinity, Rajbhandari et al. 2021).

The numbers of buffers are DeepSpeed's defaults (0.19, `runtime/zero/offload_config.py`, `swap_tensor/`). No measured
run stands behind these figures.
"""

from __future__ import annotations

from sft_play.facts.hardware import Hardware
from sft_play.facts.shapes import ModelFacts
from sft_play.plan import state
from sft_play.plan.settings import Offload, Settings
from sft_play.plan.sharding import divisors

# Elements that are updated at a time; fp32 buffers for weight, gradient and two moments of them are pinned.
SUB_GROUP_ELEMENTS = 1_000_000_000
OPTIMIZER_BUFFERS = 4
# Buffers for weights, each as large as the largest share of a matrix, and the elements that stay in host memory.
WEIGHT_BUFFERS = 5
WEIGHT_BUFFER_ELEMENTS = 100_000_000
WEIGHTS_IN_HOST = 1_000_000_000
# Read or written, of all GPUs of a machine together: one drive on four lanes of PCIe 3.0, which carry 3.9 GB/s. The
# plan does not know the drive; two of them, or PCIe 4.0, are twice as fast.
BYTES_PER_SECOND = 3e9


def disk_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Bytes on the disk for this GPU's share: optimizer state and fp32 weights; the weights too where they go there."""
    if not settings.nvme:
        return 0.0
    d = divisors(settings)
    weights = _weight_bytes(facts, settings) / d.weights if settings.offload is Offload.PARAMS else 0.0
    return state.optimizer_host_bytes(facts, settings) / d.optimizer + weights


def pinned_bytes(facts: ModelFacts, settings: Settings) -> float:
    """Host memory for this GPU's share of what the disk holds: the buffers it passes through."""
    d, width = divisors(settings), settings.compute_dtype.bytes
    share = state.trained_parameters(facts, settings) / d.optimizer
    pinned = OPTIMIZER_BUFFERS * 4.0 * min(SUB_GROUP_ELEMENTS, share)
    if settings.offload is Offload.PARAMS:
        largest = max(facts.vocab_size * facts.hidden_size, *(one.weights for one in facts.linears)) / d.weights
        buffers = WEIGHT_BUFFERS * max(WEIGHT_BUFFER_ELEMENTS, largest)
        pinned += width * (buffers + min(WEIGHTS_IN_HOST, facts.parameters / d.weights))
    return pinned


def nvme_seconds(facts: ModelFacts, settings: Settings, hardware: Hardware) -> float:
    """Seconds of a step at the disk: the state read and written, and the weights read in each pass and written once.

    DeepSpeed overlaps none of the update unless `pipeline_read` and `pipeline_write` are set.
    """
    if not settings.nvme:
        return 0.0
    d = divisors(settings)
    moved = 2 * state.optimizer_host_bytes(facts, settings) / d.optimizer
    if settings.offload is Offload.PARAMS:
        written = 0 if settings.trains_adapter else 1
        moved += (3 * settings.grad_accum + written) * _weight_bytes(facts, settings) / d.weights
    return moved * max(1, len(hardware.gpus)) / BYTES_PER_SECOND


def _weight_bytes(facts: ModelFacts, settings: Settings) -> float:
    return state.decoder_weight_bytes(facts, settings) + state.outer_weight_bytes(facts, settings)
