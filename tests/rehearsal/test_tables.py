"""The checked-in rule tables are those of the installed torch, and the hand-written rules cover them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from auto_research.rehearsal import tables
from auto_research.rehearsal.kernels import NONDETERMINISTIC
from auto_research.rehearsal.tables import load_tables, minor_of

#: Documented name -> the operators that carry it out.
CARRIED_OUT_BY = {
    "nn.AvgPool3d": ["avg_pool3d_backward"],
    "nn.AdaptiveAvgPool2d": ["_adaptive_avg_pool2d_backward"],
    "nn.AdaptiveAvgPool3d": ["_adaptive_avg_pool3d_backward"],
    "nn.AdaptiveMaxPool2d": ["adaptive_max_pool2d_backward"],
    "nn.FractionalMaxPool2d": ["fractional_max_pool2d_backward"],
    "nn.FractionalMaxPool3d": ["fractional_max_pool3d_backward"],
    "nn.MaxUnpool1d": ["max_unpool2d"],
    "nn.MaxUnpool2d": ["max_unpool2d"],
    "nn.MaxUnpool3d": ["max_unpool3d"],
    "nn.functional.interpolate": [
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward",
        "upsample_trilinear3d_backward",
    ],
    "nn.ReflectionPad1d": ["reflection_pad1d_backward"],
    "nn.ReflectionPad2d": ["reflection_pad2d_backward"],
    "nn.ReflectionPad3d": ["reflection_pad3d_backward"],
    "nn.NLLLoss": ["nll_loss2d_forward"],
    "nn.CTCLoss": ["_ctc_loss_backward"],
    "nn.EmbeddingBag": ["_embedding_bag_dense_backward"],
    "Tensor.put_": ["put_"],
    "histc": ["histc"],
    "bincount": ["bincount"],
    "median": ["median"],
    "nn.functional.grid_sample": ["grid_sampler_2d_backward", "grid_sampler_3d_backward"],
    "cumsum": ["cumsum"],
    "Tensor.scatter_reduce": ["scatter_reduce", "scatter_reduce_"],
}
#: Quantised tensors only.
NOT_COVERED = {"Tensor.resize_"}


def test_every_documented_nondeterministic_operator_has_a_rule():
    documented = load_tables().nondeterministic.keys()
    assert documented - NOT_COVERED == CARRIED_OUT_BY.keys()
    for packets in CARRIED_OUT_BY.values():
        for packet in packets:
            assert packet in NONDETERMINISTIC
            assert hasattr(torch.ops.aten, packet)


def test_the_tables_know_the_operators_of_the_installed_torch():
    known = load_tables()
    assert known.minor == minor_of(torch.__version__)
    assert {"add.Tensor", "mul_.Tensor", "addcmul", "where.self"} <= known.pointwise | {"where.self"}
    assert not {"mm", "cat", "gather", "embedding"} & known.pointwise
    assert {"histogram.bin_ct", "to_mkldnn"} <= known.cpu_only
    assert torch.int64 in known.missing_dtypes["mm"]
    assert torch.bool in known.missing_dtypes["scatter_reduce:prod"]
    assert torch.float32 not in known.missing_dtypes["mm"]


def test_reading_the_operator_database_leaves_backend_flags_settable():
    from auto_research.rehearsal.tables.generate import operator_database

    assert len(operator_database()) > 500
    assert not torch.backends.flags_frozen()


@pytest.mark.slow
def test_the_checked_in_tables_can_be_generated_again():
    from auto_research.rehearsal.tables.generate import generate

    path = Path(tables.__file__).with_name(f"torch_{load_tables().minor.replace('.', '_')}.json")
    assert json.loads(json.dumps(generate(), sort_keys=True)) == json.loads(path.read_text())
