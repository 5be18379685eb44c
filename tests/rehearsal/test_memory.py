"""The memory meter against bytes derived by hand."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from auto_research.rehearsal import rehearse
from auto_research.rehearsal.memory import LARGE, RESERVE, card_profile, extrapolate, parse_bytes
from auto_research.runtime.errors import UserError

KIB = 1024


def near(actual: int, expected: float) -> bool:
    """Within two per cent."""
    return abs(actual - expected) <= 0.02 * expected


def test_allocations_are_rounded_to_blocks_and_returned():
    with rehearse():
        assert torch.cuda.memory_allocated() == 0
        x = torch.zeros(1, device="cuda")
        assert torch.cuda.memory_allocated() == 512
        y = torch.zeros(129, device="cuda")  # 516 bytes
        assert torch.cuda.memory_allocated() == 512 + 1024
        view = y[:3]
        del y
        assert torch.cuda.memory_allocated() == 512 + 1024  # the view keeps the storage
        del x, view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 1536


def test_parameters_gradients_and_adamw():
    with rehearse() as report:
        model = nn.Linear(512, 512, bias=False, device="cuda")
        size = 512 * 512 * 4
        assert torch.cuda.memory_allocated() == size
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(1, 512, device="cuda")
        model(x).sum().backward()
        optimizer.step()
        assert near(torch.cuda.memory_allocated(), 4 * size)  # parameter, gradient, two moments
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        # The foreach step's square root of the second moment is one more parameter-sized temporary.
        assert near(torch.cuda.max_memory_allocated(), 5 * size)
        optimizer.zero_grad(set_to_none=True)
        assert near(torch.cuda.memory_allocated(), 3 * size)
        del model, optimizer, x
        gc.collect()
        assert torch.cuda.memory_allocated() == 0
    assert report.summary["memory"]["live"] == 0
    assert near(report.summary["memory"]["peak"], 5 * size)


def test_activations_of_a_chain_are_kept_for_backward():
    with rehearse():
        x = torch.ones(1024, 256, device="cuda", requires_grad=True)
        size = 1024 * 256 * 4
        out = x
        for _ in range(4):
            out = out.sigmoid()  # keeps its result
        assert torch.cuda.memory_allocated() == 5 * size
        out = out.detach()
        assert torch.cuda.memory_allocated() == 2 * size


def test_checkpointing_keeps_only_the_boundary():
    def block(x):
        return x.sigmoid().sigmoid().sigmoid()

    with rehearse():
        x = torch.ones(1024, 256, device="cuda", requires_grad=True)
        size = 1024 * 256 * 4
        out = checkpoint(block, x, use_reentrant=False)
        assert torch.cuda.memory_allocated() == 2 * size
        out.sum().backward()
        assert torch.equal(x.grad.cpu(), _plain_gradient(block))


def _plain_gradient(block):
    x = torch.ones(1024, 256, requires_grad=True)
    block(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_charged_like_a_fused_kernel(dropout):
    heads, length, width = 4, 256, 32
    with rehearse():
        q, k, v = (torch.randn(1, heads, length, width, device="cuda", requires_grad=True) for _ in range(3))
        operand = heads * length * width * 4
        before = torch.cuda.memory_allocated()
        assert before == 3 * operand
        torch.cuda.reset_peak_memory_stats()
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        logsumexp = heads * length * 4
        assert near(torch.cuda.memory_allocated() - before, operand + logsumexp)
        # A score matrix would be heads * length * length * 4 bytes: eight operands.
        assert torch.cuda.max_memory_allocated() - before < 2 * operand
        out.sum().backward()
        assert all(t.grad.is_cuda for t in (q, k, v))


def test_resizing_in_place_is_charged():
    with rehearse():
        x = torch.zeros(0, device="cuda")
        x.resize_(1024)
        assert torch.cuda.memory_allocated() == 4096
        del x
        assert torch.cuda.memory_allocated() == 0


def test_autocast_weight_copies_are_freed():
    with rehearse():
        layer = nn.Linear(256, 256, bias=False, device="cuda")
        size = 256 * 256 * 4
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
            layer(torch.ones(1, 256, device="cuda"))
            assert near(torch.cuda.memory_allocated(), 1.5 * size)
        assert torch.cuda.memory_allocated() == size


def test_the_largest_tensors_at_the_peak_are_named_with_their_line():
    with rehearse() as report:
        small = torch.zeros(LARGE // 4, device="cuda")
        big = torch.zeros(8 * LARGE // 4, device="cuda")
        del big
        torch.zeros(2 * LARGE // 4, device="cuda")
        del small
    largest = report.summary["memory"]["largest_at_peak"]
    assert [entry["bytes"] for entry in largest] == [8 * LARGE, LARGE]
    assert "test_memory.py" in largest[0]["site"]
    assert report.summary["memory"]["peak"] == 9 * LARGE


def test_extrapolation_from_two_batches():
    def step(model, optimizer, batch):
        model(torch.ones(batch, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with rehearse() as report:
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 64)  # makes the states
        torch.cuda.reset_peak_memory_stats()
        for batch in (512, 1024):
            step(model, optimizer, batch)
            report.batch(batch)
        predicted = report.peak_at(4096)
        step(model, optimizer, 4096)
        assert near(torch.cuda.max_memory_allocated(), predicted)
        largest = report.largest_batch()
        assert report.peak_at(largest) <= report._session.meter.budget < report.peak_at(largest + 64)
    assert report.summary["memory"]["batches"][1]["batch"] == 1024
    with pytest.raises(UserError, match="different batch sizes"):
        extrapolate(4, 10, 4, 10, 8)


def test_out_of_memory_is_raised_once_and_names_the_large_tensors():
    with rehearse(memory=RESERVE + 1024 * KIB, keep_going=True) as report:
        kept = [torch.zeros(64 * KIB, device="cuda") for _ in range(6)]
    assert len(kept) == 6
    (finding,) = report.findings
    assert finding.rule == "MEM-1"
    assert "test_memory.py" in finding.message
    with rehearse(memory=RESERVE + 1024 * KIB), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1024 * KIB, device="cuda")


def test_cards_and_sizes():
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("1.5 MB") == 1_500_000
    assert card_profile("a30").memory == 24 * 2**30
    assert card_profile("A30", "1GiB").memory == 2**30
    with pytest.raises(UserError, match="not a memory size"):
        parse_bytes("many")
    with pytest.raises(UserError, match="Unknown card"):
        card_profile("a31")
    with rehearse("h100"):
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == 80 * 2**30
        free, total = torch.cuda.mem_get_info()
        assert 0 < free < total
