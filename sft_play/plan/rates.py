"""Constants of speed: what share of a GPU's rates programs reach, by family of GPU and library of kernels.

"fms", "torchtune" and "torchtitan" are the published tables that the memory constants come from too.
"""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.plan.settings import Kernels


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the vendor's rates.

    Attributes:
        matmul: of the tensor rate, for large matrices.
        attention: of the tensor rate, for flash-like attention kernels.
        bandwidth: of the memory bandwidth, for pointwise kernels.
        fp32: rate of fp32 products, as a share of the 16-bit tensor rate.
    """

    matmul: float
    attention: float
    bandwidth: float
    fp32: float


# A100: 0.77 of 312 TFLOP/s in cuBLAS (fms, full fine-tuning, the part that grows with tokens); FlashAttention-2
# 0.45 to 0.6 (Dao 2023, figure 5). H100, H200: 0.78 measured for one product alone, 0.65 within a step (NeMo, 8B LoRA,
# H100; Unsloth, Qwen3-8B LoRA, H200), 0.47 where cards are limited to 500 W (torchtitan, 8B: 33 to 39% MFU);
# FlashAttention-2 0.35 to 0.4 there (Shah et al. 2024, figure 1).
# 4090: above its nominal clock, 0.92 of 165 TFLOP/s (torchtune 8B LoRA). L40S 0.55 (PEFT 3B). MI300X and a
# power-limited B200: torchtitan 8B. fp32: the vendors' ratio of fp32 to 16-bit tensor rate.
# Where no run is published (V100, T4, 3000 and 5000 series, A10, L4) the nearest relative's figure.
EFFICIENCY: dict[str, Efficiency] = {
    "volta": Efficiency(matmul=0.65, attention=0.25, bandwidth=0.75, fp32=1 / 8),
    "turing": Efficiency(matmul=0.45, attention=0.2, bandwidth=0.75, fp32=1 / 8),
    "ampere-consumer": Efficiency(matmul=0.8, attention=0.45, bandwidth=0.85, fp32=1 / 2),
    "ampere-inference": Efficiency(matmul=0.55, attention=0.35, bandwidth=0.8, fp32=1 / 4),
    "ampere-datacenter": Efficiency(matmul=0.77, attention=0.48, bandwidth=0.8, fp32=1 / 16),
    "ada-consumer": Efficiency(matmul=0.92, attention=0.5, bandwidth=0.85, fp32=1 / 2),
    "ada-inference": Efficiency(matmul=0.55, attention=0.4, bandwidth=0.8, fp32=1 / 4),
    "hopper": Efficiency(matmul=0.65, attention=0.4, bandwidth=0.8, fp32=1 / 15),
    "hopper-limited": Efficiency(matmul=0.47, attention=0.33, bandwidth=0.8, fp32=1 / 15),
    "blackwell-consumer": Efficiency(matmul=0.75, attention=0.45, bandwidth=0.85, fp32=1 / 2),
    "blackwell-datacenter": Efficiency(matmul=0.3, attention=0.17, bandwidth=0.8, fp32=1 / 28),
    "cdna3": Efficiency(matmul=0.3, attention=0.15, bandwidth=0.7, fp32=1 / 8),
}
UNKNOWN_EFFICIENCY = Efficiency(matmul=0.5, attention=0.3, bandwidth=0.7, fp32=1 / 16)

# Share of their time that matrix products of the decoder take in fp8, casts and scales included (torchao's page
# "Quantized Training": up to 1.25 times the throughput of bf16 for 8B on 8 GPUs, compiled, of which products are most).
FP8_MATMUL = 0.75

# Matrices of hidden size h reach h / (h + this) of that: waves and tiles that do not fill (fms: 7B, 3B and 1B).
SMALL_MATRIX_HIDDEN = 250

# Bytes moved by pointwise kernels in one forward pass of a layer, a token, in units of 2 x (4 hidden + 3 inner).
# The backward pass moves twice that. fms: HF against Triton; torchtune: compile on and off.
POINTWISE: dict[Kernels, float] = {
    Kernels.HF: 3.4,
    Kernels.TRITON: 1.9,
    Kernels.LIGER: 1.9,
    Kernels.UNSLOTH: 1.9,
    Kernels.TORCHTUNE: 4.5,
    Kernels.TORCHTITAN: 2.6,
}
COMPILED_POINTWISE = 1.4
# Bytes a logit that the loss moves, forward and backward: fp32 copies written and read, or 16 bits in place.
LOGIT_TRAFFIC: dict[Kernels, float] = dict.fromkeys(Kernels, 40.0) | {
    Kernels.TRITON: 14.0,
    Kernels.LIGER: 14.0,
    Kernels.UNSLOTH: 14.0,
}
# An adapter's pass over its input and output: casts, two thin products, scale and add, in bytes a value; by half
# less in 16 bits, and by half again compiled (torchtune LoRA 3B and 8B; fms 7B and 3B in fp32 under autocast).
ADAPTER_TRAFFIC = 18.0
# Packed weights read and 16-bit weights written and read again, bytes a weight and pass (bitsandbytes dequantises
# into a buffer before each product).
DEQUANTISE_TRAFFIC = 4.5
# Bytes an optimizer step moves for each trained parameter of 2 bytes: foreach AdamW writes every intermediate list,
# 75 (fms 7B: 0.27 s a step on an A100); fused reads and writes each operand once.
STEP_TRAFFIC_FOREACH = 75.0
STEP_TRAFFIC_FUSED = 20.0
# Part of a communication that runs beside computation, and what a ring reaches of the link. FSDP2 and DDP overlap
# well (torchtitan, 64 A100: 51 to 61% MFU); FSDP1 under the HF Trainer hides nothing that can be seen (fms, 2 A100:
# 8x7B loses 1.5 s and 7B 0.3 s a step, whatever the batch).
OVERLAP = 0.75
OVERLAP_FSDP1 = 0.0
# GeForce cards have no peer-to-peer (NVIDIA/nccl issue 1309): every copy goes through host memory and crosses the bus
# twice. Both ways at once three 4090s on PCIe 4.0 x16 then reach 13 GB/s each way where 24 are there
# (tinygrad/open-gpu-kernel-modules issue 6, "P2P=Disabled"), 0.54 of it; a ring a little less.
RING_EFFICIENCY = {"nvlink": 0.4, "pcie": 0.7, "pcie through host memory": 0.45, "network": 0.7}
WITHOUT_PEER_ACCESS = frozenset({"ampere-consumer", "ada-consumer", "blackwell-consumer"})
# Host work of FSDP1's hooks, a layer and micro-batch; fms 3B and 1B, where gathers are small.
FSDP1_SECONDS_A_LAYER = 3e-3
# Seconds the host needs to launch the kernels of one layer in one pass: what remains when batches are tiny.
LAUNCH_SECONDS_A_LAYER = 0.35e-3
