"""Device work: what is counted, against hand counts, and what the counts prove."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from auto_research.runtime.evidence import DeviceWork, device_work_verdict, use_log


def counts(work: DeviceWork, device: str = "cpu") -> tuple[int, int, int, int]:
    """(operations, elements, flops, bytes) on a device."""
    found = work.counts().get(device, dict.fromkeys(("operations", "elements", "flops", "bytes"), 0))
    return found["operations"], found["elements"], found["flops"], found["bytes"]


# ------------------------------------------------------------------------------------- what is counted


def test_plain_compute() -> None:
    x = torch.ones(3, 4)
    with DeviceWork() as work:
        y = x + 1  # 12 elements, 48 new bytes
        y.mul_(2)  # 12 elements in place
        y.sum()  # 1 element, 4 bytes
    assert counts(work) == (3, 25, 0, 52)


def test_views_are_no_work() -> None:
    x = torch.ones(3, 4)
    with DeviceWork() as work:
        x.view(4, 3).t()[1:].unsqueeze(0).expand(5, -1, -1).detach()
    assert counts(work) == (0, 0, 0, 0)


def test_factories_and_copies_allocate_and_do_not_compute() -> None:
    x = torch.ones(3, 4)
    with DeviceWork() as work:
        torch.zeros(10)
        torch.randn(10)
        x.clone()
        x.to(torch.float64)
        torch.empty_like(x).copy_(x)
    operations, elements, flops, fresh = counts(work)
    assert (elements, flops, fresh) == (0, 0, 40 + 40 + 48 + 96 + 48)
    assert operations == 6


def test_another_dtype_has_its_own_size() -> None:
    x = torch.ones(8, dtype=torch.bfloat16)
    with DeviceWork() as work:
        x * x
    assert counts(work) == (1, 8, 0, 16)


def test_results_of_several_tensors() -> None:
    x = torch.arange(12.0).view(3, 4)
    with DeviceWork() as work:
        x.topk(2)  # values (3, 2) float32 and indices (3, 2) int64
        torch._foreach_add_([x, x[0].clone()], 1.0)  # returns nothing; 12 + 4 elements
    assert counts(work) == (3, 12 + 16, 0, 24 + 48 + 16)


def test_an_optimiser_step_counts() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = torch.ones(100)
    for fused in (False, True):
        optimiser = torch.optim.AdamW([weight], fused=fused)
        with DeviceWork() as work:
            optimiser.step()
        assert counts(work)[1] >= 100, f"fused={fused}"


@pytest.mark.parametrize(
    "shapes, flops",
    [
        (((2, 3), (3, 5)), 2 * 2 * 3 * 5),
        (((7, 2, 3), (7, 3, 5)), 2 * 7 * 2 * 3 * 5),
        (((7, 2, 3), (3, 5)), 2 * 7 * 2 * 3 * 5),
        (((2, 3), (3,)), 2 * 2 * 3),
        (((3,), (3,)), 2 * 3),
    ],
)
def test_products(shapes: tuple[tuple[int, ...], tuple[int, ...]], flops: int) -> None:
    a, b = (torch.ones(shape) for shape in shapes)
    with DeviceWork() as work:
        a @ b
    assert counts(work)[2] == flops


def test_a_linear_layer_forward_and_backward() -> None:
    """Forward 2BIO; backward the same for the weight and again for the input."""
    layer, x = torch.nn.Linear(8, 16), torch.ones(4, 8, requires_grad=True)
    with DeviceWork() as work:
        loss = layer(x).sum()
        forward = counts(work)[2]
        loss.backward()
    assert forward == 2 * 4 * 8 * 16
    assert counts(work)[2] == 3 * forward


def network(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    modules: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {
        "convolution": (torch.nn.Conv1d(3, 4, 3), torch.ones(2, 3, 9)),
        "mlp": (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)), torch.ones(4, 8)),
        "transformer": (torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.ones(2, 5, 16)),
    }  # fmt: skip
    return modules[kind]


@pytest.mark.parametrize("kind", ["convolution", "mlp", "transformer"])
def test_training_agrees_with_torchs_own_counter(kind: str) -> None:
    torch.manual_seed(0)
    module, x = network(kind)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with DeviceWork() as work:
            module(x).sum().backward()
        with FlopCounterMode(display=False) as reference:
            module(x).sum().backward()
    assert counts(work)[2] == reference.get_total_flops() > 0


def test_fused_attention_counts_as_its_two_products() -> None:
    query, key, value = (torch.randn(2, 3, length, 4, requires_grad=True) for length in (5, 7, 7))
    with DeviceWork() as work, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(query, key, value)
        forward = counts(work)[2]
        out.sum().backward()
    assert forward == 2 * 2 * (2 * 3 * 5 * 7 * 4)
    assert counts(work)[2] - forward == forward * 5 // 2


def test_recurrent_layers_count_their_weights() -> None:
    """2 (batch x steps) rows meet every entry of the input and hidden weights; fused (inference) or not."""
    x = torch.randn(2, 3, 4)
    for module in (torch.nn.GRU(4, 8, batch_first=True), torch.nn.LSTM(4, 8, batch_first=True)):
        expected = 2 * 2 * 3 * sum(w.numel() for w in module.parameters() if w.dim() == 2)
        for grad in (False, True):
            with DeviceWork() as work, torch.set_grad_enabled(grad):
                module(x)
            assert counts(work)[2] == expected, (module, grad)


@pytest.mark.parametrize("kind", ["convolution", "mlp", "transformer"])
def test_inference_counts_the_same_with_and_without_autograd(kind: str) -> None:
    """In inference mode torch dispatches composite operations (linear, matmul, ...) whole."""
    module, x = network(kind)
    module.eval()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with DeviceWork() as plain, torch.no_grad():
                module(x)
            with DeviceWork() as inference, torch.inference_mode():
                module(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert counts(inference)[1:3] == counts(plain)[1:3]
    assert counts(inference)[2] > 0


def test_backward_in_another_thread_of_autograd_counts() -> None:
    """On an accelerator backward runs in threads of the engine, which inherit the counting. A custom
    function makes the same visible here: its backward is Python code that the engine calls."""
    seen: list[int] = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(threading.get_ident())
            (x,) = ctx.saved_tensors
            return gradient * 3 * x @ x

    x = torch.ones(4, 4, requires_grad=True)
    with DeviceWork() as work:
        Cube.apply(x).sum().backward()
    assert seen
    assert counts(work)[2] == 2 * 4**3


def test_work_on_another_device_is_its_own() -> None:
    a, b = torch.ones(2, 3), torch.empty(3, 5, device="meta")
    with DeviceWork() as work:
        a @ torch.ones(3, 1)
        torch.empty(2, 3, device="meta") @ b
    assert counts(work)[2] == 12
    assert counts(work, "meta") == (2, 10, 60, 24 + 40)


def test_only_the_block_counts() -> None:
    with DeviceWork() as work:
        pass
    torch.ones(3) + 1
    assert work.counts() == {}


# ------------------------------------------------------------------------------------------- the record


def test_the_record(tmp_path: Path) -> None:
    with use_log(tmp_path / "log") as log, DeviceWork("run"):
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert log is not None
    (record,) = log.records()
    assert record["event"] == "device_work"
    assert (record["scope"], record["depth"], record["error"]) == ("run", 0, None)
    assert record["seconds"] > 0
    assert record["devices"] == {"cpu": {"operations": 3, "elements": 10, "flops": 60, "bytes": 24 + 60 + 40}}
    if not torch.cuda.is_initialized():
        assert record["peak_bytes"] == {}


def test_an_exception_leaves_the_record_and_goes_on(tmp_path: Path) -> None:
    def fail() -> None:
        with DeviceWork():
            torch.ones(2) + 1
            raise ZeroDivisionError

    with use_log(tmp_path / "log") as log, pytest.raises(ZeroDivisionError):
        fail()
    assert log is not None
    (record,) = log.records()
    assert record["error"] == "ZeroDivisionError"
    assert record["devices"]["cpu"]["elements"] == 2


def test_nested_blocks_say_so_and_count_once(tmp_path: Path) -> None:
    with use_log(tmp_path / "log") as log, DeviceWork("run"):
        torch.ones(2) + 1
        with DeviceWork("stage"):
            torch.ones(5) + 1
    assert log is not None
    stage, run = log.records()
    assert (stage["scope"], stage["depth"], stage["devices"]["cpu"]["elements"]) == ("stage", 1, 5)
    assert (run["scope"], run["depth"], run["devices"]["cpu"]["elements"]) == ("run", 0, 7)
    verdict = device_work_verdict([call("cpu"), stage, run], "cpu")
    assert verdict.share == 1.0


# ------------------------------------------------------------------------------------------ the verdict


def call(resolved: str) -> dict[str, Any]:
    return {"event": "device_for", "resolved": resolved}


def work_record(**devices: tuple[int, int, int]) -> dict[str, Any]:
    """A record with (elements, flops, bytes) per device."""
    named = {
        device: {"operations": 1, "elements": elements, "flops": flops, "bytes": size}
        for device, (elements, flops, size) in devices.items()
    }
    return {"event": "device_work", "depth": 0, "devices": named}


@pytest.mark.parametrize(
    "records, requested, status",
    [
        ([], "cuda", "completed_without_device_call"),
        ([work_record(cuda=(9, 9, 9))], "cuda", "completed_without_device_call"),
        ([call("cpu"), work_record(cuda=(9, 9, 9))], "cuda", "completed_without_device_call"),
        ([call("cuda:1"), work_record(cuda=(9, 9, 9))], "cuda:0", "completed_without_device_call"),
        ([call("cuda:0")], "cuda", "resolved_without_device_work"),
        ([call("cuda:0"), work_record()], "cuda", "resolved_without_device_work"),
        # A token operation on the device, the real work on the CPU.
        ([call("cuda:0"), work_record(cuda=(1, 0, 4), cpu=(5, 100, 9))], "cuda", "resolved_without_device_work"),
        ([call("cuda:0"), work_record(cuda=(99, 50, 4), cpu=(1, 50, 9))], "cuda", "resolved_without_device_work"),
        ([call("cuda:0"), work_record(cuda=(5, 0, 4), cpu=(6, 0, 9))], "cuda", "resolved_without_device_work"),
        ([call("cuda:0"), work_record(cuda=(5, 9, 0))], "cuda", "resolved_without_device_work"),
        # FLOPs decide over elements where there are any.
        ([call("cuda:0"), work_record(cuda=(1, 51, 4), cpu=(99, 49, 9))], "cuda", "pass"),
        ([call("cuda:0"), work_record(cuda=(6, 0, 4), cpu=(5, 0, 9))], "cuda", "pass"),
        ([call("cpu"), call("cuda:0"), work_record(cuda=(6, 1, 4))], "cuda:0", "pass"),
        # Several processes of one run add up.
        ([call("cuda:0"), work_record(cuda=(1, 60, 4)), work_record(cpu=(1, 50, 4))], "cuda", "pass"),
        ([call("cpu"), work_record(cpu=(1, 1, 1))], "cpu", "pass"),
        ([call("mps"), work_record(mps=(1, 1, 1))], "mps", "pass"),
    ],
)  # fmt: skip
def test_the_verdict(records: list[dict[str, Any]], requested: str, status: str) -> None:
    verdict = device_work_verdict(records, requested)
    assert verdict.status == status
    assert verdict.reason


def test_auto_is_no_device_to_judge() -> None:
    with pytest.raises(ValueError, match="resolve the device first"):
        device_work_verdict([], "auto")


amounts = st.integers(min_value=0, max_value=10**15)


@given(amounts, amounts, amounts, amounts, amounts)
def test_a_pass_always_means_the_majority(
    cuda_flops: int, cpu_flops: int, cuda_elements: int, cpu_elements: int, size: int
) -> None:
    record = work_record(cuda=(cuda_elements, cuda_flops, size), cpu=(cpu_elements, cpu_flops, 1))
    verdict = device_work_verdict([call("cuda:0"), record], "cuda")
    if cuda_flops + cpu_flops:
        majority = cuda_flops > cpu_flops
    else:
        majority = cuda_elements > cpu_elements
    # The share is a float: an even split within rounding may fall either way.
    if abs(cuda_flops - cpu_flops) > 1 or cuda_flops + cpu_flops == 0:
        assert (verdict.status == "pass") == (majority and size > 0)
