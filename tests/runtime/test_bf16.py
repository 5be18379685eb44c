"""BF16 products through FP32 kernels: the numbers of a BF16 unit, in the forward and in the backward pass."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from auto_research.runtime import bf16
from auto_research.runtime.bf16 import RoundedProducts, fast_bf16


def rounded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(found, wanted, units=1.0):
    """Within half a unit in the last place of BF16, and as much again for the order of the additions."""
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), wanted, rtol=units * 2**-8, atol=units * 2**-8)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 33), st.integers(1, 5))
def test_a_product_is_the_exact_one_rounded(rows, inner, columns):
    a, b, c = rounded(rows, inner), rounded(inner, columns, seed=1), rounded(columns, seed=2)
    with RoundedProducts():
        close(a @ b, a.double() @ b.double())
        close(F.linear(a, b.T, c), a.double() @ b.double() + c.double())
        close(a[None] @ b[None], (a.double() @ b.double())[None])


def test_gradients_are_those_of_native_bf16():
    found = []
    for mode in (nullcontext(), RoundedProducts()):
        x, w = rounded(6, 16).requires_grad_(), rounded(16, 16, seed=1).requires_grad_()
        with mode:
            heads = F.linear(x, w).view(1, 6, 2, 8).transpose(1, 2)
            out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            out.float().square().sum().backward()
        found.append((out.detach(), x.grad, w.grad))
    for native, fast in zip(*found):
        assert fast.dtype == native.dtype == torch.bfloat16
        scale = float(native.double().abs().max())
        assert torch.allclose(native.double(), fast.double(), atol=0.03 * scale)


def test_other_numbers_are_left_alone():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with RoundedProducts():
        assert torch.equal(a @ b, torch.mm(a, b))
        assert (a @ b).dtype == torch.float32
        assert (a.double() @ b.double()).dtype == torch.float64
        assert torch.equal(a.bfloat16() + 1, (a.bfloat16().float() + 1).bfloat16())


@pytest.mark.parametrize("units", [True, False])
def test_it_is_used_where_the_processor_lacks_units(monkeypatch, units):
    monkeypatch.setattr(bf16, "bf16_units", lambda: units)
    assert isinstance(fast_bf16("cpu"), nullcontext if units else RoundedProducts)
    assert isinstance(fast_bf16("cuda:0"), nullcontext)
    assert isinstance(fast_bf16(torch.device("cuda")), nullcontext)
