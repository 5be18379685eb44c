"""What must work as on a card: modules, optimisers, copies, checkpoints, threads, transforms; and give CPU numbers."""

from __future__ import annotations

import copy
import io
import pickle
import queue
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from auto_research.rehearsal import rehearse
from auto_research.rehearsal.tables import load_tables, minor_of
from auto_research.runtime.errors import UserError


@pytest.fixture
def report():
    """A rehearsal in keep-going mode that must end without findings."""
    with rehearse(keep_going=True) as running:
        yield running
    assert [f.text() for f in running.findings] == []


def test_torch_is_itself_again_afterwards():
    before = (torch.device, torch.tensor, torch.Tensor.to, torch.zeros, torch.cuda.is_available, torch.Generator)
    with rehearse():
        assert torch.cuda.is_available()
        assert torch.ones(1).cuda().is_cuda
        assert before[0] is not torch.device
    assert before == (
        torch.device,
        torch.tensor,
        torch.Tensor.to,
        torch.zeros,
        torch.cuda.is_available,
        torch.Generator,
    )
    assert not torch.cuda.is_available()
    assert "device" not in vars(torch.Tensor)


def test_a_device_context_works_within_and_afterwards():
    """Transformers builds every model under `with torch.device("meta")`; in a fresh process nothing is cached yet."""
    program = """
import torch
from auto_research.rehearsal import rehearse
def made():
    with torch.device("meta"):
        made = (torch.arange(3), torch.zeros(2), torch.tensor([1]), torch.nn.Linear(2, 2).weight)
    return {tensor.device.type for tensor in made}
with rehearse():
    assert made() == {"meta"}, made()
assert made() == {"meta"}, made()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_one_rehearsal_at_a_time():
    with rehearse(), pytest.raises(UserError, match="running already"), rehearse():
        pass


def test_no_cpp_tensor_is_ever_on_cuda(report):
    x = torch.ones(3, device="cuda")
    assert x.device == torch.device("cuda:0")
    assert torch._C.TensorBase.device.__get__(x).type == "cpu"


def test_devices_compare_and_print(report):
    x = torch.ones(2, device="cuda")
    assert (x.device.type, x.device.index, x.get_device(), x.is_cuda, x.is_cpu) == ("cuda", 0, 0, True, False)
    assert isinstance(x.device, torch.device)
    assert torch.device(0) == torch.device("cuda", 0)
    assert "device='cuda:0'" in repr(x)
    assert "cuda" not in repr(x.cpu())
    assert pickle.loads(pickle.dumps(x.device)) == x.device
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.to(torch.float64).device.type == x.double().device.type == "cuda"
    assert x.type_as(torch.ones(1)).is_cpu
    assert torch.zeros(2, device=0).is_cuda
    assert nn.Linear(2, 2).to(0).weight.is_cuda


def test_optimiser_before_to_and_tied_weights(report):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.to("cuda")
    assert model.head.weight is model.embedding.weight
    assert optimizer.param_groups[0]["params"][0] is model.embedding.weight
    ids = torch.tensor([1, 2, 3])
    F.cross_entropy(model(ids.cuda()), ids.cuda()).backward()
    optimizer.step()
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    F.cross_entropy(plain(ids), ids).backward()
    reference.step()
    assert torch.allclose(model.head.weight.cpu(), plain.head.weight, atol=1e-6)


def test_gradient_travels_back_through_moves(report):
    host = torch.ones(3, requires_grad=True)
    card = host.to("cuda") * 2
    (card.cpu() * card.detach().cpu()).sum().backward()
    assert host.grad.is_cpu
    assert host.grad.tolist() == [4.0, 4.0, 4.0]
    buffer = torch.zeros(3, device="cuda")
    source = torch.ones(3, requires_grad=True)
    (buffer.clone().copy_(source) * 3).sum().backward()
    assert source.grad.is_cpu


def test_scalar_on_the_host_gets_its_gradient_on_the_host(report):
    scale = torch.tensor(2.0, requires_grad=True)
    weights = torch.ones(3, requires_grad=True)
    x = torch.ones(4, device="cuda")
    (x * scale * weights.sum()).sum().backward()
    assert scale.grad.is_cpu
    assert weights.grad.is_cpu
    assert scale.grad.item() == 12.0
    scale.grad.add_(torch.ones(()))


def test_zero_gradients_from_cpp_are_on_the_card(report):
    x = torch.ones(3, device="cuda", requires_grad=True)
    torch.sign(x).sum().backward()
    assert x.grad.is_cuda
    (gradient,) = torch.autograd.grad(torch.floor(x * 2).sum(), x)
    assert gradient.is_cuda


def test_helpers_of_composites_are_adopted_and_users_are_not(report):
    ids = torch.tensor([0, 2], device="cuda")
    assert F.one_hot(ids, 4).is_cuda
    packed = pack_padded_sequence(torch.ones(2, 3, 4, device="cuda"), torch.tensor([3, 2]), batch_first=True)
    assert pad_packed_sequence(packed, batch_first=True)[0].is_cuda
    assert torch.where(ids > 0, 1.0, 0.0).is_cuda
    assert torch.block_diag(torch.ones(2, 2, device="cuda"), torch.ones(1, 1, device="cuda")).is_cuda
    assert torch.linalg.matrix_rank(torch.ones(0, 0, device="cuda")).is_cuda
    with torch.random.fork_rng(devices=[]):
        pass


def test_a_users_helper_on_the_same_line_is_still_found():
    with rehearse(keep_going=True) as found:
        torch.ones(3, device="cuda") + torch.zeros(3)
    assert [f.rule for f in found.findings] == ["DEV-1"]


def test_explicit_host_devices_mean_it(report):
    x = torch.ones(3, device="cuda")
    for host in (torch.zeros_like(x, device="cpu"), x.new_zeros(2, device="cpu"), x.to("cpu"), x.cpu()):
        assert host.is_cpu
    assert x.cpu() is not x
    assert x.to("cuda") is x
    assert torch.zeros_like(x).is_cuda
    assert x.new_tensor([1.0]).is_cuda
    assert torch.tensor([x[0], x[1]]).is_cpu
    assert torch.as_tensor(np.ones(2), device="cuda").is_cuda


def test_numpy_arrays_are_not_aliased_by_the_card(report):
    array = np.zeros(3, dtype=np.float32)
    card = torch.as_tensor(array, device="cuda")
    array[0] = 5.0
    assert card.tolist() == [0.0, 0.0, 0.0]


def test_deepcopy_and_pickle(report):
    model = nn.Linear(3, 3).cuda()
    twin = copy.deepcopy(model)
    assert twin.weight.is_cuda
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    assert pickle.loads(pickle.dumps(model)).weight.is_cuda
    assert report._session.syncs.total() == 0  # copying is no wait


def test_checkpoints_restore_where_they_were_or_where_asked(report):
    model = nn.Linear(3, 3).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for where, expected in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda"), (lambda s, loc: s, "cpu")):
        file.seek(0)
        state = torch.load(file, map_location=where)
        assert state["model"]["weight"].device.type == expected
    file.seek(0)
    fresh = nn.Linear(3, 3).cuda()
    fresh.load_state_dict(torch.load(file)["model"])
    assert torch.equal(fresh.weight, model.weight)


def test_a_card_checkpoint_does_not_load_without_a_card():
    file = io.BytesIO()
    with rehearse():
        torch.save(torch.ones(2, device="cuda"), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(file)


def test_storages_of_views_share_the_tag(report):
    x = torch.ones(4, 4, device="cuda")
    for view in (x.t(), x[1:], x.detach(), x.data, x.view(16), x.as_strided((2,), (1,)), nn.Parameter(x)):
        assert view.is_cuda
    other = torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (2,), (1,))
    assert other.is_cuda
    assert x.untyped_storage().device.type == "cuda"


def test_sparse_and_jagged(report):
    graph = torch.eye(3).to_sparse().to("cuda")
    assert graph.is_cuda
    assert (graph @ torch.ones(3, 2, device="cuda")).is_cuda
    weights = nn.Embedding(5, 2, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(weights.parameters())
    weights(torch.tensor([1, 2], device="cuda")).sum().backward()
    optimizer.step()
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
    assert (jagged * 2).device.type == "cuda"
    assert jagged.values().is_cuda


def test_function_transforms(report):
    x = torch.ones(3, 2, device="cuda")
    assert vmap(lambda row: row.sum())(x).is_cuda
    assert grad(lambda t: (t**2).sum())(x).is_cuda
    model = nn.Linear(2, 2).cuda()
    parameters = dict(model.named_parameters())
    assert functional_call(model, parameters, (x,)).is_cuda
    per_sample = vmap(grad(lambda p, row: functional_call(model, p, (row[None],)).sum()), in_dims=(None, 0))
    assert per_sample(parameters, x)["weight"].shape == (3, 2, 2)


def test_inference_mode_still_checks_composites():
    with rehearse(keep_going=True) as found, torch.inference_mode():
        layer = nn.Linear(3, 2).cuda()
        assert layer(torch.ones(1, 3, device="cuda")).is_cuda
        F.linear(torch.ones(1, 3, device="cuda"), torch.ones(2, 3))
    assert [f.rule for f in found.findings] == ["DEV-1"]
    assert found.summary["share"]["device_flops"] > 0


def test_custom_operators_run_with_checks():
    @torch.library.custom_op("rehearsal_tests::shift", mutates_args=())
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3, device=x.device) + torch.zeros(3)

    with rehearse(keep_going=True) as found:
        assert shift(torch.ones(3, device="cuda")).is_cuda
    assert [f.rule for f in found.findings] == ["DEV-1"]


def test_torchscript(report):
    @torch.jit.script
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(3, device=x.device)

    assert scale(torch.ones(3, device="cuda")).is_cuda


def test_threads_are_rehearsed():
    results: queue.Queue = queue.Queue()

    def work():
        results.put((torch.ones(2, device="cuda") * torch.ones(2)).device.type)

    with rehearse(keep_going=True) as found:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results.get() == "cuda"
    assert [f.rule for f in found.findings] == ["DEV-1"]


def test_default_device_in_its_three_forms(report):
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1.0]).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda
        assert torch.ones(2, device="cpu").is_cpu
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).is_cpu


def test_meta_initialisation(report):
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    model.to_empty(device="cuda")
    assert model.weight.is_cuda


def test_loader_pins_and_workers_stay_on_the_host(report):
    data = TensorDataset(torch.arange(8.0))
    for workers in (0, 1):
        for (x,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
            assert x.is_pinned()
            assert x.to("cuda", non_blocking=True).is_cuda


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}])
def test_optimiser_variants_agree_with_the_cpu(options):
    def run(device, **extra):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **extra)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    expected = run("cpu")
    with rehearse() as found:
        assert torch.allclose(run("cuda", **options), expected, atol=1e-5)
    assert found.findings == []


def test_grad_scaler_skips_overflow_and_unscales(report):
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 4.0
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_streams_events_and_random_state(report):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0.0
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    torch.cuda.manual_seed_all(1)
    drawn = torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    assert torch.equal(drawn.cpu(), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_compile_is_eager_and_noted():
    with rehearse() as found:
        doubled = torch.compile(lambda x: x * 2)(torch.ones(2, device="cuda"))
        assert doubled.is_cuda
    assert any("torch.compile" in note for note in found.summary["not_rehearsed"])


def test_visible_devices_may_be_empty(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with rehearse():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0


def test_two_cards():
    with rehearse(device_count=2, keep_going=True) as found:
        assert torch.ones(1, device="cuda:1").device.index == 1
        with torch.cuda.device(1):
            assert torch.ones(1, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 0
        assert torch.ones(1, device="cuda:1").to("cuda:0").device.index == 0
    assert found.findings == []


def test_printing_and_tolist_count_one_wait():
    with rehearse() as found:
        x = torch.ones(50, device="cuda")
        str(x)
        x.tolist()
        x.sum().item()
    sites = found.summary["synchronisations"]["sites"]
    assert sorted((entry["kind"], entry["count"]) for entry in sites) == [("item", 1), ("print", 1), ("tolist", 1)]


def test_waits_are_counted_by_optimiser_step():
    with rehearse() as found:
        model = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(1, 2, device="cuda")).sum()
            loss.backward()
            loss.item()
            if loss > 100:
                break
            optimizer.step()
    waits = found.summary["synchronisations"]
    assert waits["steps"] == 3
    assert waits["per_step"] == [2, 2, 2]
    assert {entry["count"] for entry in waits["sites"]} == {3}


def test_share_of_work_on_the_device():
    with rehearse() as found:
        torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
        torch.ones(4, 4) @ torch.ones(4, 4)
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert found.summary["share"]["device_flops"] == 2 * 4**3
    assert found.summary["share"]["flops_on_device"] == pytest.approx(1 / 3)


def test_emulated_kernels_are_listed_not_reported():
    with rehearse(keep_going=True) as found:
        counts = torch.histc(torch.tensor([0, 1, 1], device="cuda"), bins=2, min=0, max=1)
        wave = torch.fft.rfft(torch.ones(8, device="cuda", dtype=torch.float16))
    assert counts.tolist() == [1, 2]
    assert wave.dtype == torch.complex32
    assert found.findings == []
    assert set(found.summary["emulated"]) == {"histc", "fft.rfft in half precision"}


def test_nondeterministic_operators_are_listed():
    with rehearse() as found:
        table = nn.Embedding(5, 2).cuda()
        table(torch.tensor([1, 1], device="cuda")).sum().backward()
    assert "embedding_dense_backward" in {e["operator"] for e in found.summary["nondeterministic"]}


def test_consequences_of_a_fault_are_not_reported_again():
    with rehearse(keep_going=True) as found:
        model = nn.Sequential(nn.Linear(3, 3).cuda(), nn.Linear(3, 3))  # the second layer stayed behind
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3, device="cuda")).sum().backward()
            optimizer.step()
    assert [f.rule for f in found.findings] == ["DEV-1"]


def test_ignored_findings_are_left_out():
    with rehearse(ignore=["DEV-1:test_semantics.py"]) as found:
        torch.ones(3, device="cuda") + torch.ones(3)
    assert found.findings == []
    with rehearse(ignore=["DEV-3"]), pytest.raises(RuntimeError):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_an_unlisted_torch_minor_warns_loudly():
    assert minor_of("2.13.0+cu128") == "2.13"
    load_tables.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"no rule tables for torch 9\.9"):
        load_tables("9.9.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_tables(torch.__version__)


def test_the_audit_and_the_rehearsal_count_the_same_floating_point_operations():
    from auto_research.runtime._device_work import Work

    def step(device):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).to(device)
        image = torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5, device=device), torch.ones(3, 2, 3, 3, device=device))
        (layer(torch.ones(2, 7, 16, device=device)).sum() + image.sum()).backward()

    with Work() as work:
        step("cpu")
    with rehearse() as report:
        step("cuda")
    counted = report.summary["share"]
    assert counted["device_flops"] == sum(counts.flops for counts in work.counts.values()) > 10_000
    assert counted["host_flops"] == 0


def test_sending_a_device_tensor_to_another_process_is_named():
    """No exhibit of the museum: on a card it works as long as the sender lives, which no rehearsal can follow."""
    from multiprocessing.reduction import ForkingPickler

    with rehearse(keep_going=True) as report:
        tensor = torch.arange(6.0, device="cuda").view(2, 3).bfloat16()
        arrived = pickle.loads(ForkingPickler.dumps(tensor))
        assert arrived.is_cuda
        assert torch.equal(arrived, tensor)
        host = pickle.loads(ForkingPickler.dumps(nn.Parameter(tensor.cpu())))
        assert not host.is_cuda
    (finding,) = report.findings
    assert (finding.rule, finding.level, finding.file) == ("MP-1", "warning", __file__)


def test_sparse_tensors_of_device_parts_are_sparse_and_on_the_card(report):
    edges, weights = torch.tensor([[0, 1], [1, 0]], device="cuda"), torch.ones(2, device="cuda", requires_grad=True)
    graph = torch.sparse_coo_tensor(edges, weights, (2, 2))
    assert graph.is_cuda
    assert graph.layout is torch.sparse_coo
    torch.sparse.mm(graph, torch.ones(2, 3, device="cuda")).sum().backward()
    assert weights.grad is not None
    assert weights.grad.is_cuda
    assert torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="cuda").is_cuda
    assert torch.sparse_csr_tensor([0, 1, 2], [0, 1], torch.ones(2, device="cuda"), (2, 2)).is_cuda
    assert torch.sparse_coo_tensor((2, 2), device="cuda").is_cuda
    assert not torch.sparse_coo_tensor((2, 2)).is_cuda


def test_lengths_of_ctc_may_stay_on_the_host(report):
    scores = torch.randn(10, 2, 5, device="cuda", requires_grad=True)
    plain = scores.detach().cpu().requires_grad_()
    targets, inputs, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([10, 9]), torch.tensor([2, 2])
    loss = F.ctc_loss(scores.log_softmax(2), targets, inputs, lengths)
    loss.backward()
    F.ctc_loss(plain.log_softmax(2), targets, inputs, lengths).backward()
    assert loss.is_cuda
    assert torch.allclose(scores.grad.cpu(), plain.grad)


def test_one_hot_of_known_width_does_not_wait(report):
    ids = torch.tensor([0, 2], device="cuda")
    assert F.one_hot(ids, 3).is_cuda
    assert sum(report._session.syncs.values()) == 0
    F.one_hot(ids)
    assert sum(report._session.syncs.values()) > 0


def test_forward_mode_through_a_layer(report):
    layer, x = nn.Linear(3, 2).cuda(), torch.rand(4, 3, device="cuda")
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert tangent.is_cuda
    assert torch.allclose(tangent, torch.ones_like(x) @ layer.weight.T)


def test_a_function_with_an_unused_output_gets_zeros_on_the_card(report):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            (x,) = ctx.saved_tensors
            return first * 2 + second * x

    x = torch.ones(3, device="cuda", requires_grad=True)
    Both.apply(x)[0].sum().backward()
    assert x.grad.is_cuda
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_two_cards_do_not_mix():
    with rehearse(keep_going=True, device_count=2) as report:
        first, second = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        second.copy_(first)
        assert (first.to("cuda:1") + second).get_device() == 1
        torch._foreach_add([first, second], [first, second])
        assert report.findings == []
        first + second
        nn.Linear(3, 2).to("cuda:1")(first)
    assert [finding.rule for finding in report.findings] == ["DEV-1", "DEV-1"]
    assert "cuda:0 and cuda:1" in report.findings[0].message


def test_hidden_cards_refuse(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with rehearse(keep_going=True) as report:
        assert not torch.cuda.is_available()
        torch.ones(3).cuda()
    (finding,) = report.findings
    assert (finding.rule, finding.message) == ("DEV-5", "No CUDA GPUs are available")


def test_errors_of_the_host_are_no_faults_of_a_card():
    def position():
        return [1, 2][4]

    def host_table():
        return nn.Embedding(3, 2)(torch.tensor([5]))

    def dimension():
        return torch.ones(3, device="cuda").sum(dim=4)

    for program in (position, host_table, dimension):
        with pytest.raises(IndexError), rehearse(keep_going=True) as report:
            program()
        assert report.findings == []


def test_boolean_indexing_waits_and_filling_a_mask_does_not(report):
    def waits(program):
        before = sum(report._session.syncs.values())
        program()
        return sum(report._session.syncs.values()) - before

    x, mask = torch.arange(6.0, device="cuda"), torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.bool, device="cuda")
    assert waits(lambda: x[mask]) == 1
    assert waits(lambda: x.__setitem__(mask, torch.ones(4, device="cuda"))) == 1
    assert waits(lambda: x.__setitem__(mask, 0.0)) == 0
    assert waits(lambda: x[mask.long()]) == 0
    assert waits(lambda: x[mask.cpu()]) == 1  # the copy to the host
