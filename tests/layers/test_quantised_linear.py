"""Weight-only quantisation: formulas by hand, dtypes, packing, bytes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from auto_research.layers import quantised_linear as q


def test_int8_by_hand():
    weight = torch.tensor([[1.27, -0.635, 0.006], [0.0, 0.0, 0.0], [-2.54, 0.02, 2.53]])
    codes, scale = q.quantise_int8(weight)
    assert scale[:, 0].tolist() == pytest.approx([0.01, 1.0, 0.02])
    assert codes.dtype == torch.int8
    assert codes[0].tolist() == [127, -64, 1]  # -63.5 rounds to even
    assert codes[1].tolist() == [0, 0, 0]
    assert codes[2].tolist() == [-127, 1, 126]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 150), st.sampled_from([4, 8]), st.integers(0, 10**6))
def test_error_is_at_most_half_a_step(outputs, inputs, bits, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs)
    layer = q.QuantisedLinear(linear, bits, group=64)
    step = layer.scale if bits == 8 else layer.scale.repeat_interleave(64, 1)[:, :inputs]
    error = (layer.rebuilt() - linear.weight).abs()
    assert bool((error <= 0.5 * step * (1 + 1e-4) + 1e-7).all())
    x = torch.randn(3, inputs)
    torch.testing.assert_close(layer(x), x @ layer.rebuilt().T + linear.bias)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 131), st.sampled_from([1, 16, 64]))
def test_int4_packing_against_a_loop(outputs, inputs, group):
    torch.manual_seed(inputs)
    weight = torch.randn(outputs, inputs)
    packed, scale = q.quantise_int4(weight, group)
    assert packed.dtype == torch.uint8
    assert packed.shape == (outputs, (inputs + 1) // 2)
    codes = q.unpack_int4(packed, inputs)
    for o in range(outputs):
        for i in range(inputs):
            block = weight[o, i // group * group : (i // group + 1) * group]
            s = float(block.abs().max() / 7) or 1.0
            assert float(scale[o, i // group]) == pytest.approx(s, rel=1e-6)
            assert abs(int(codes[o, i]) - float(weight[o, i]) / s) <= 0.5 + 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_weight_and_bias_take_the_activations_dtype(dtype, bits, bias):
    layer = q.QuantisedLinear(nn.Linear(70, 5, bias=bias), bits)
    x = torch.randn(2, 3, 70, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 5)
    expected = x.double() @ layer.rebuilt(dtype).double().T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(y.double(), expected, atol=0.1 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)


def test_scale_survives_a_cast_of_the_whole_model():
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    quantised = q.quantise_linears(model)
    before = quantised[0].scale.clone()
    cast = copy.deepcopy(quantised).bfloat16()
    assert cast[0].scale.dtype == torch.float32
    assert torch.equal(cast[0].scale, before)
    assert cast[0].codes.dtype == torch.int8
    assert cast(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert cast(torch.randn(2, 8, dtype=torch.bfloat16)).isfinite().all()


def test_a_half_precision_layer_is_quantised_in_float32():
    linear = nn.Linear(64, 3, bias=False).bfloat16()
    wide = nn.Linear(64, 3, bias=False)
    wide.weight.data = linear.weight.data.float()
    one, two = q.QuantisedLinear(linear), q.QuantisedLinear(wide)
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(one.scale, two.scale)


def test_only_linear_layers_but_the_head_are_replaced():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.lm_head = nn.Linear(8, 10, bias=False)
            self.lm_head.weight = self.embed.weight

    model = Tiny()
    small = q.quantise_linears(model)
    assert isinstance(small.inner[0], q.QuantisedLinear)
    assert type(small.lm_head) is nn.Linear
    assert small.lm_head.weight is small.embed.weight
    assert type(model.inner[0]) is nn.Linear, "the original changed"
    with pytest.raises(ValueError, match="merge"):
        q.quantise_linears(small)


def test_bytes_on_disk_count_a_tied_tensor_once(tmp_path):
    from safetensors.torch import save_file

    model = nn.Linear(100, 50)
    mixed = nn.Sequential(model, nn.LayerNorm(7).bfloat16(), q.QuantisedLinear(nn.Linear(33, 9)), nn.Embedding(3, 5))
    for number, some in enumerate((model, mixed, q.quantise_linears(mixed, 4))):
        save_file(some.state_dict(), tmp_path / f"{number}.safetensors")
        assert q.bytes_on_disk(some) == (tmp_path / f"{number}.safetensors").stat().st_size
    tied = nn.ModuleDict({"a": model, "b": model})
    assert abs(q.bytes_on_disk(tied) - q.bytes_on_disk(model)) < 100
    big = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    assert q.bytes_on_disk(q.quantise_linears(big, 8)) < 0.27 * q.bytes_on_disk(big)
    assert q.bytes_on_disk(q.quantise_linears(big, 4)) < 0.16 * q.bytes_on_disk(big)
