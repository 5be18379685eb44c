"""CUDA autocast in a rehearsal: every registered operator follows the policy table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auto_research.rehearsal import rehearse
from auto_research.rehearsal.tables import load_tables

POLICY = load_tables().autocast
LOW = torch.bfloat16
A, V, C, IMAGE = (3, 3), (3,), (1, 2, 8), (1, 2, 8, 8)
VOLUME = (1, 2, 4, 4, 4)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Positive random numbers below one on the card."""
    return (torch.rand(*shape) * 0.8 + 0.1).to(dtype).to("cuda")


def ids(*values: int) -> torch.Tensor:
    """Class ids on the card."""
    return torch.tensor(values, device="cuda")


def convolution(d: torch.dtype, dims: int, transposed: bool = False) -> list:
    """Arguments of ``convolution`` and ``_convolution``."""
    shape, kernel = (1, 2, *[6] * dims), (2, 2, *[3] * dims)
    return [
        r(*shape, dtype=d),
        r(*kernel, dtype=d),
        None,
        [1] * dims,
        [0] * dims,
        [1] * dims,
        transposed,
        [0] * dims,
        1,
    ]


def cell(d: torch.dtype, gates: int, states: int = 1) -> list:
    """Arguments of the recurrent cells."""
    hidden = [r(2, 3, dtype=d) for _ in range(states)]
    return [r(2, 4, dtype=d), hidden if states > 1 else hidden[0], r(3 * gates, 4, dtype=d), r(3 * gates, 3, dtype=d)]


def calls(d: torch.dtype) -> dict[str, list]:
    """Arguments for every registered overload, tensors in dtype ``d``."""
    one, mat, batch = r(*V, dtype=d), r(*A, dtype=d), r(2, 3, 3, dtype=d)
    image, line, volume = r(*IMAGE, dtype=d), r(*C, dtype=d), r(*VOLUME, dtype=d)
    pair, same = [mat, r(*A, dtype=d)], ids(0, 1, 2)
    table: dict[str, list] = {
        "_convolution": [*convolution(d, 2), False, False, True, True],
        "_convolution.deprecated": [*convolution(d, 2), False, False, True],
        "convolution": convolution(d, 2),
        "conv1d": [r(1, 2, 6, dtype=d), r(2, 2, 3, dtype=d)],
        "conv2d": [r(1, 2, 6, 6, dtype=d), r(2, 2, 3, 3, dtype=d)],
        "conv3d": [r(1, 2, 6, 6, 6, dtype=d), r(2, 2, 3, 3, 3, dtype=d)],
        "conv_tbc": [r(6, 1, 2, dtype=d), r(3, 2, 2, dtype=d), r(2, dtype=d)],
        "conv_transpose1d": [r(1, 2, 6, dtype=d), r(2, 2, 3, dtype=d)],
        "conv_transpose2d.input": [r(1, 2, 6, 6, dtype=d), r(2, 2, 3, 3, dtype=d)],
        "conv_transpose3d.input": [r(1, 2, 6, 6, 6, dtype=d), r(2, 2, 3, 3, 3, dtype=d)],
        "prelu": [mat, r(1, dtype=d)],
        "addmm": [mat, *pair],
        "addmv": [one, mat, one],
        "addr": [mat, one, one],
        "matmul": pair,
        "mm": pair,
        "mv": [mat, one],
        "linear": pair,
        "linalg_vecdot": [one, one],
        "einsum": ["ij,jk->ik", pair],
        "addbmm": [mat, batch, batch],
        "baddbmm": [batch, batch, batch],
        "bmm": [batch, batch],
        "chain_matmul": [pair],
        "linalg_multi_dot": [pair],
        "lstm_cell": cell(d, 4, 2),
        "gru_cell": cell(d, 3),
        "rnn_tanh_cell": cell(d, 1),
        "rnn_relu_cell": cell(d, 1),
        "scaled_dot_product_attention": [r(1, 2, 4, 8, dtype=d)] * 3,
        "softplus": [mat],
        "layer_norm": [mat, [3]],
        "native_layer_norm": [mat, [3], None, None, 1e-5],
        "rms_norm": [mat, [3]],
        "group_norm": [r(2, 4, 3, dtype=d), 2],
        "frobenius_norm.dim": [mat, [0, 1]],
        "nuclear_norm": [mat],
        "nuclear_norm.dim": [mat, [0, 1]],
        "cosine_similarity": pair,
        "poisson_nll_loss": [*pair, True, False, 1e-8, 1],
        "cosine_embedding_loss": [*pair, torch.ones(3, device="cuda", dtype=d)],
        "nll_loss": [mat, same],
        "nll_loss2d": [r(1, 3, 2, 2, dtype=d), torch.zeros(1, 2, 2, dtype=torch.int64, device="cuda")],
        "hinge_embedding_loss": [mat, torch.ones(3, 3, device="cuda", dtype=d)],
        "kl_div": pair,
        "l1_loss": pair,
        "smooth_l1_loss": pair,
        "huber_loss": pair,
        "mse_loss": pair,
        "margin_ranking_loss": [one, one, torch.ones(3, device="cuda", dtype=d)],
        "multilabel_margin_loss": [mat, torch.zeros(3, 3, dtype=torch.int64, device="cuda")],
        "soft_margin_loss": pair,
        "triplet_margin_loss": [mat, mat, mat],
        "multi_margin_loss": [mat, same],
        "binary_cross_entropy_with_logits": pair,
        "dist": pair,
        "pdist": [mat],
        "cdist": pair,
        "renorm": [mat, 2, 0, 1.0],
        "logsumexp": [mat, [0]],
        "upsample_nearest1d": [line, [16]],
        "_upsample_nearest_exact1d": [line, [16]],
        "upsample_nearest2d": [image, [16, 16]],
        "_upsample_nearest_exact2d": [image, [16, 16]],
        "upsample_nearest3d": [volume, [8, 8, 8]],
        "_upsample_nearest_exact3d": [volume, [8, 8, 8]],
        "upsample_linear1d": [line, [16], False],
        "upsample_bilinear2d": [image, [16, 16], False],
        "_upsample_bilinear2d_aa": [image, [4, 4], False],
        "upsample_trilinear3d": [volume, [8, 8, 8], False],
        "upsample_bicubic2d": [image, [16, 16], False],
        "_upsample_bicubic2d_aa": [image, [4, 4], False],
        "pow.Tensor_Scalar": [mat, 2],
        "pow.Tensor_Tensor": pair,
        "pow.Scalar": [2, mat],
        "prod": [mat],
        "prod.dim_int": [mat, 0],
        "softmax.int": [mat, 0],
        "log_softmax.int": [mat, 0],
        "cumprod": [mat, 0],
        "cumsum": [mat, 0],
        "linalg_vector_norm": [mat],
        "linalg_matrix_norm": [mat, 1],
        "linalg_matrix_norm.str_ord": [mat, "fro"],
        "sum": [mat],
        "sum.dim_IntList": [mat, [0]],
        "norm.Scalar": [mat],
        "norm.ScalarOpt_dim": [mat, 2, [0], False],
        "addcdiv": [mat, *pair],
        "addcmul": [mat, *pair],
        "atan2": pair,
        "bilinear": [mat, mat, r(2, 3, 3, dtype=d)],
        "cross": pair,
        "dot": [one, one],
        "vdot": [one, one],
        "grid_sampler": [image, r(1, 4, 4, 2, dtype=d), 0, 0, False],
        "index_put": [mat, [ids(0)], one],
        "tensordot": [mat, mat, [1], [0]],
        "scatter_add": [mat, 0, torch.zeros(3, 3, dtype=torch.int64, device="cuda"), mat],
    }
    for name in POLICY:
        if name not in table and POLICY[name] == "fp32":
            table[name] = [mat]
    return table


#: Registered kernels that only a CUDA library can run.
NEEDS_CUDA = {
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_scaled_dot_product_flash_attention",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
FLOATS = sorted(POLICY.keys() - NEEDS_CUDA - {"binary_cross_entropy"})


def overload(name: str):
    """The operator of a registered name."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def result_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the first result under bfloat16 autocast with inputs of ``dtype``."""
    torch.manual_seed(0)
    with torch.autocast("cuda", dtype=LOW):
        out = overload(name)(*calls(dtype)[name])
    return (out[0] if isinstance(out, tuple | list) else out).dtype


def test_the_table_is_complete():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {name.removeprefix("aten::") for name in registered} == POLICY.keys()
    assert len(POLICY) == 119


@pytest.mark.parametrize("name", FLOATS)
def test_output_dtype_follows_the_policy(name):
    policy = POLICY[name]
    with rehearse(check_memory=False):
        from_float, from_half = result_dtype(name, torch.float32), result_dtype(name, LOW)
    if policy == "lower":
        assert (from_float, from_half) == (LOW, LOW)
    elif policy == "promote":
        assert (from_float, from_half) == (torch.float32, LOW)
    else:
        assert (from_float, from_half) == (torch.float32, torch.float32)


def test_host_tensors_are_left_alone():
    with rehearse(), torch.autocast("cuda"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with rehearse(), torch.autocast("cpu", dtype=LOW):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == LOW
        card = torch.ones(2, 2, device="cuda")
        assert (card @ card).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")


def test_double_is_never_cast():
    with rehearse(), torch.autocast("cuda"):
        x = torch.ones(2, 2, device="cuda", dtype=torch.float64)
        assert (x @ x).dtype == torch.float64


def test_weights_are_cast_once_and_gradients_return_in_float32():
    with rehearse():
        layer = nn.Linear(3, 3).cuda()
        x = torch.ones(2, 3, device="cuda")
        with torch.autocast("cuda", dtype=LOW):
            out = layer(layer(x))
        assert out.dtype == LOW
        out.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


def test_autocast_ends_with_the_rehearsal():
    with rehearse(), torch.autocast("cuda"):
        pass
    with torch.autocast("cpu", dtype=LOW):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == LOW
        assert F.softmax(torch.ones(2, dtype=LOW), 0).dtype == LOW


def test_recurrent_layers_run_in_the_lower_dtype():
    with rehearse(), torch.autocast("cuda", dtype=torch.float16):
        out, state = nn.GRU(4, 3, batch_first=True).cuda()(torch.ones(2, 5, 4, device="cuda"))
    assert (out.dtype, state.dtype) == (torch.float16, torch.float16)
