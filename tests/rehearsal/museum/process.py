"""ASY, DET, OOB, MEM, DST: races, determinism, ranges, memory, distributed."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .exhibit import Exhibit


class ReadBeforeTheCopyArrives(Exhibit):
    rule = "ASY-1"
    error = None  # a card returns garbage and says nothing

    @staticmethod
    def faulty():
        scores = torch.randn(4, device="cuda").to("cpu", non_blocking=True)
        return scores.sum()  # fault

    @staticmethod
    def mended():
        scores = torch.randn(4, device="cuda").to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        return scores.sum()


class PinnedBufferReadTooEarly(Exhibit):
    rule = "ASY-1"
    error = None

    @staticmethod
    def faulty():
        buffer = torch.empty(4, pin_memory=True)
        buffer.copy_(torch.randn(4, device="cuda"), non_blocking=True)
        return buffer.tolist()  # fault

    @staticmethod
    def mended():
        buffer = torch.empty(4, pin_memory=True)
        buffer.copy_(torch.randn(4, device="cuda"), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return buffer.tolist()


class _Deterministic:
    def __enter__(self):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *error):
        torch.use_deterministic_algorithms(False)


class CumulativeSumInDeterministicMode(Exhibit):
    rule = "DET-1"

    @staticmethod
    def faulty():
        with _Deterministic():
            return torch.cumsum(torch.rand(5, device="cuda"), 0)  # fault

    @staticmethod
    def mended():
        with _Deterministic():
            return torch.cumsum(torch.ones(5, dtype=torch.int64, device="cuda"), 0)


class HistogramInDeterministicMode(Exhibit):
    rule = "DET-1"

    @staticmethod
    def faulty():
        with _Deterministic():
            return torch.histc(torch.rand(5, device="cuda"), bins=4)  # fault

    @staticmethod
    def mended():
        with _Deterministic():
            return torch.bucketize(torch.rand(5, device="cuda"), torch.linspace(0, 1, 5, device="cuda"))


class BilinearBackwardInDeterministicMode(Exhibit):
    rule = "DET-1"

    @staticmethod
    def faulty():
        image = torch.randn(1, 1, 4, 4, device="cuda", requires_grad=True)
        with _Deterministic():
            loss = F.interpolate(image, scale_factor=2.0, mode="bicubic").sum()
            loss.backward()  # fault

    @staticmethod
    def mended():
        image = torch.randn(1, 1, 4, 4, device="cuda", requires_grad=True)
        with _Deterministic():
            F.interpolate(image, scale_factor=2.0, mode="nearest").sum().backward()


class PutInDeterministicMode(Exhibit):
    rule = "DET-1"

    @staticmethod
    def faulty():
        x = torch.zeros(4, device="cuda")
        with _Deterministic():
            return x.put_(torch.tensor([0, 1], device="cuda"), torch.ones(2, device="cuda"))  # fault

    @staticmethod
    def mended():
        x = torch.zeros(4, device="cuda")
        with _Deterministic():
            return x.index_put_((torch.tensor([0, 1], device="cuda"),), torch.ones(2, device="cuda"))


class WeightedBincountInDeterministicMode(Exhibit):
    rule = "DET-1"

    @staticmethod
    def faulty():
        ids = torch.tensor([0, 1, 1], device="cuda")
        with _Deterministic():
            return torch.bincount(ids, weights=torch.rand(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        ids = torch.tensor([0, 1, 1], device="cuda")
        with _Deterministic():
            return torch.zeros(2, device="cuda").index_add_(0, ids, torch.rand(3, device="cuda"))


class IdBeyondTheTable(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        table = nn.Embedding(10, 4).cuda()
        result = table(torch.tensor([3, 10], device="cuda"))  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        table = nn.Embedding(11, 4).cuda()
        return table(torch.tensor([3, 10], device="cuda"))


class ClassBeyondTheLogits(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        logits = torch.randn(2, 5, device="cuda")
        result = F.cross_entropy(logits, torch.tensor([0, 5], device="cuda"))  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        logits = torch.randn(2, 5, device="cuda")
        return F.cross_entropy(logits, torch.tensor([0, 4], device="cuda"))


class GatherBeyondTheRow(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        scores = torch.randn(2, 5, device="cuda")
        result = scores.gather(1, torch.tensor([[5], [0]], device="cuda"))  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        scores = torch.randn(2, 5, device="cuda")
        return scores.gather(1, torch.tensor([[4], [0]], device="cuda"))


class BatchTooLargeForTheCard(Exhibit):
    rule = "MEM-1"
    error = torch.OutOfMemoryError
    memory = "616MiB"  # the reserve for context and workspaces is 600 MiB

    @staticmethod
    def faulty():
        rows = 3_000_000 if torch.cuda.get_device_properties(0).total_memory < 2**30 else 2**38
        return torch.empty(rows, 2, device="cuda")  # fault

    @staticmethod
    def mended():
        total = torch.zeros(2, device="cuda")
        for _ in range(4):
            total += torch.ones(1000, 2, device="cuda").sum(0)
        return total


class _ProcessGroup:
    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    def __exit__(self, *error):
        dist.destroy_process_group()


class HostTensorInCollective(Exhibit):
    rule = "DST-1"

    @staticmethod
    def faulty():
        with _ProcessGroup():
            dist.all_reduce(torch.ones(2))  # fault

    @staticmethod
    def mended():
        with _ProcessGroup():
            dist.all_reduce(torch.ones(2, device="cuda"))


class HostModuleInDdp(Exhibit):
    rule = "DST-2"
    error = ValueError

    @staticmethod
    def faulty():
        with _ProcessGroup():
            return nn.parallel.DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])  # fault

    @staticmethod
    def mended():
        with _ProcessGroup():
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])
            model(torch.ones(1, 2, device="cuda")).sum().backward()
            return model.module.weight.grad


class CategoryBeyondTheEncoding(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        result = F.one_hot(torch.tensor([0, 5], device="cuda"), num_classes=5)  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        return F.one_hot(torch.tensor([0, 5], device="cuda"), num_classes=6)


class ProbabilityBeyondOne(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        logits = torch.tensor([1.5, -0.5], device="cuda")
        result = F.binary_cross_entropy(logits, torch.ones(2, device="cuda"))  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        logits = torch.tensor([1.5, -0.5], device="cuda")
        return F.binary_cross_entropy(logits.sigmoid(), torch.ones(2, device="cuda"))


class NegativeSamplingWeight(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        weights = torch.tensor([-1.0, 2.0], device="cuda")
        result = torch.multinomial(weights, 1)  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        weights = torch.tensor([-1.0, 2.0], device="cuda")
        return torch.multinomial(weights.clamp(min=0), 1)


class BagIdBeyondTheTable(Exhibit):
    rule = "OOB-1"
    poisons = True

    @staticmethod
    def faulty():
        bag = nn.EmbeddingBag(4, 2).cuda()
        result = bag(torch.tensor([[0, 4]], device="cuda"))  # fault
        torch.cuda.synchronize()
        return result

    @staticmethod
    def mended():
        bag = nn.EmbeddingBag(5, 2).cuda()
        return bag(torch.tensor([[0, 4]], device="cuda"))
