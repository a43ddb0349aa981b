"""The kernels that a GPU run stands on, each against plain arithmetic in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def generator() -> torch.Generator:
    import torch

    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has no bf16 units (compute capability below 8.0)")
    return torch.Generator("cuda").manual_seed(0)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    got, exact = got.detach().float(), exact.detach().float()
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_causal_attention_in_bf16(generator: torch.Generator, kv_heads: int) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def made(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 256, 64, device="cuda", generator=generator)

    query, key, value = made(8), made(kv_heads), made(kv_heads)
    grouped = {"is_causal": True, "enable_gqa": kv_heads != 8}
    got = scaled_dot_product_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), **grouped)
    many = 8 // kv_heads
    scores = query @ key.repeat_interleave(many, 1).transpose(-1, -2) / 8.0
    hidden = torch.ones(256, 256, device="cuda", dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.repeat_interleave(many, 1)
    assert relative_error(got, exact) < 0.02


@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_layer_multiplies_by_what_it_stores(generator: torch.Generator, double: bool) -> None:
    import bitsandbytes
    import torch

    layer = bitsandbytes.nn.Linear4bit(
        512, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=double
    ).cuda()
    stored = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    rows = torch.randn(64, 512, device="cuda", generator=generator, dtype=torch.bfloat16, requires_grad=True)
    got = layer(rows)
    assert relative_error(got, rows.float() @ stored.float().T) < 0.02
    got.float().sum().backward()
    assert rows.grad is not None
    assert relative_error(rows.grad, stored.float().sum(0).expand(64, -1)) < 0.02


def test_the_fused_optimizer_steps_like_the_plain_one(generator: torch.Generator) -> None:
    import torch

    start = torch.randn(1000, device="cuda", generator=generator)
    gradient = torch.randn(1000, device="cuda", generator=generator)
    ends = []
    for fused in (False, True):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        for _ in range(3):
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
