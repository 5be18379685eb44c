"""DEV-2 to DEV-8: indexing, NumPy, generators, ordinals, pinning, legacy constructors, forks."""

from __future__ import annotations

import io
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .exhibit import Exhibit


class DeviceIdsIntoHostTable(Exhibit):
    rule = "DEV-2"

    @staticmethod
    def faulty():
        popularity = torch.rand(10)
        ids = torch.tensor([1, 2], device="cuda")
        return popularity[ids]  # fault

    @staticmethod
    def mended():
        popularity = torch.rand(10, device="cuda")
        ids = torch.tensor([1, 2], device="cuda")
        return popularity[ids], popularity[torch.tensor([3])]  # a host index into a device table is legal


class DeviceMaskOnHostTensor(Exhibit):
    rule = "DEV-2"

    @staticmethod
    def faulty():
        values = torch.arange(4.0)
        keep = torch.tensor([True, False, True, False], device="cuda")
        return values[keep]  # fault

    @staticmethod
    def mended():
        values = torch.arange(4.0)
        keep = torch.tensor([True, False, True, False], device="cuda")
        return values[keep.cpu()]


class AssignThroughDeviceIndex(Exhibit):
    rule = "DEV-2"

    @staticmethod
    def faulty():
        history = torch.zeros(5)
        history[torch.tensor([0, 1], device="cuda")] = 1.0  # fault
        return history

    @staticmethod
    def mended():
        history = torch.zeros(5)
        history[torch.tensor([0, 1], device="cuda").cpu()] = 1.0
        return history


class TopItemsOfHostCatalogue(Exhibit):
    rule = "DEV-2"

    @staticmethod
    def faulty():
        item_ids = torch.arange(100, 110)
        top = torch.rand(2, 10, device="cuda").topk(3).indices
        return item_ids[top]  # fault

    @staticmethod
    def mended():
        item_ids = torch.arange(100, 110, device="cuda")
        top = torch.rand(2, 10, device="cuda").topk(3).indices
        return item_ids[top]


class NumpyOfDevice(Exhibit):
    rule = "DEV-3"
    error = TypeError

    @staticmethod
    def faulty():
        return torch.ones(3, device="cuda").numpy()  # fault

    @staticmethod
    def mended():
        return torch.ones(3, device="cuda").cpu().numpy()


class AsarrayOfDevice(Exhibit):
    rule = "DEV-3"
    error = TypeError

    @staticmethod
    def faulty():
        return np.asarray(torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        return np.asarray(torch.ones(3, device="cuda").cpu())


class NumpyMeanOfLosses(Exhibit):
    rule = "DEV-3"
    error = TypeError

    @staticmethod
    def faulty():
        losses = [torch.ones((), device="cuda"), torch.ones((), device="cuda")]
        return np.mean(np.array([loss.detach().numpy() for loss in losses]))  # fault

    @staticmethod
    def mended():
        losses = [torch.ones((), device="cuda"), torch.ones((), device="cuda")]
        return np.mean([loss.item() for loss in losses])


class UfuncOfDevice(Exhibit):
    rule = "DEV-3"
    error = TypeError

    @staticmethod
    def faulty():
        return np.exp(torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        return np.exp(torch.ones(3, device="cuda").cpu().numpy())


class NumpyAfterDetach(Exhibit):
    rule = "DEV-3"
    error = TypeError

    @staticmethod
    def faulty():
        scores = nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
        return scores.detach().numpy().argsort()  # fault

    @staticmethod
    def mended():
        scores = nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
        return scores.detach().cpu().numpy().argsort()


class HostGeneratorForDevice(Exhibit):
    rule = "DEV-4"

    @staticmethod
    def faulty():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(3, device="cuda", generator=generator)  # fault

    @staticmethod
    def mended():
        generator = torch.Generator(device="cuda").manual_seed(0)
        return torch.randn(3, device="cuda", generator=generator)


class DeviceGeneratorForHost(Exhibit):
    rule = "DEV-4"

    @staticmethod
    def faulty():
        generator = torch.Generator(device="cuda")
        return torch.randperm(5, generator=generator)  # fault

    @staticmethod
    def mended():
        generator = torch.Generator(device="cuda")
        return torch.randperm(5, generator=generator, device="cuda")


class SamplerGeneratorInPlace(Exhibit):
    rule = "DEV-4"

    @staticmethod
    def faulty():
        weights = torch.rand(6, device="cuda")
        return torch.multinomial(weights, 2, generator=torch.Generator())  # fault

    @staticmethod
    def mended():
        weights = torch.rand(6, device="cuda")
        return torch.multinomial(weights, 2, generator=torch.Generator(device="cuda"))


class ShuffleUnderDefaultDevice(Exhibit):
    rule = "DEV-4"

    @staticmethod
    def faulty():
        torch.set_default_device("cuda")
        try:
            loader = DataLoader(TensorDataset(torch.arange(4)), shuffle=True)
            return list(loader)  # fault
        finally:
            torch.set_default_device(None)

    @staticmethod
    def mended():
        torch.set_default_device("cuda")
        try:
            generator = torch.Generator(device="cuda")
            loader = DataLoader(TensorDataset(torch.arange(4)), shuffle=True, generator=generator)
            return list(loader)
        finally:
            torch.set_default_device(None)


class MissingOrdinal(Exhibit):
    rule = "DEV-5"

    @staticmethod
    def faulty():
        return torch.ones(3).to("cuda:63")  # fault

    @staticmethod
    def mended():
        return torch.ones(3).to("cuda:0")


class MissingOrdinalInFactory(Exhibit):
    rule = "DEV-5"

    @staticmethod
    def faulty():
        return torch.zeros(3, device="cuda:63")  # fault

    @staticmethod
    def mended():
        return torch.zeros(3, device=torch.cuda.current_device())


class SetMissingDevice(Exhibit):
    rule = "DEV-5"

    @staticmethod
    def faulty():
        torch.cuda.set_device(63)  # fault

    @staticmethod
    def mended():
        torch.cuda.set_device(0)


class CheckpointOfAnotherCard(Exhibit):
    rule = "DEV-5"

    @staticmethod
    def faulty():
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        return torch.load(file, map_location="cuda:63")  # fault

    @staticmethod
    def mended():
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        return torch.load(file, map_location="cuda:0")


class PinDeviceTensor(Exhibit):
    rule = "DEV-6"

    @staticmethod
    def faulty():
        return torch.ones(3, device="cuda").pin_memory()  # fault

    @staticmethod
    def mended():
        return torch.ones(3).pin_memory().to("cuda", non_blocking=True)


class PinningLoaderOverDeviceData(Exhibit):
    rule = "DEV-6"

    @staticmethod
    def faulty():
        data = TensorDataset(torch.ones(4, 2, device="cuda"))
        return next(iter(DataLoader(data, batch_size=2, pin_memory=True)))  # fault

    @staticmethod
    def mended():
        data = TensorDataset(torch.ones(4, 2))
        (batch,) = next(iter(DataLoader(data, batch_size=2, pin_memory=True)))
        assert batch.is_pinned()
        return batch.to("cuda")


class BoolTensorOfDevice(Exhibit):
    rule = "DEV-7"
    error = TypeError

    @staticmethod
    def faulty():
        ids = torch.tensor([0, 1, 2], device="cuda")
        return torch.BoolTensor(ids == 0)  # fault

    @staticmethod
    def mended():
        ids = torch.tensor([0, 1, 2], device="cuda")
        return ids == 0


class FloatTensorOfDevice(Exhibit):
    rule = "DEV-7"
    error = TypeError

    @staticmethod
    def faulty():
        return torch.FloatTensor(torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        return torch.ones(3, device="cuda").float(), torch.FloatTensor([1.0, 2.0])


def _in_fork(work) -> str:
    """Run ``work`` in a forked child; returns the text of what it raised, or ''."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            text = ""
        except BaseException as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


class DeviceInForkedChild(Exhibit):
    rule = "DEV-8"

    @staticmethod
    def faulty():
        torch.ones(1, device="cuda")
        text = _in_fork(lambda: torch.ones(1, device="cuda"))  # fault
        if text:
            raise RuntimeError(text)

    @staticmethod
    def mended():
        torch.ones(1, device="cuda")
        text = _in_fork(lambda: torch.ones(1) * 2)
        if text:
            raise RuntimeError(text)


class DeviceDataInWorker(Exhibit):
    """A dataset keeps its tensor on the card; a forked loader worker indexes it."""

    rule = "DEV-8"

    @staticmethod
    def faulty():
        data = torch.ones(4, 2, device="cuda")
        text = _in_fork(lambda: data[0] * 2)  # fault
        if text:
            raise RuntimeError(text)

    @staticmethod
    def mended():
        data = torch.ones(4, 2)
        data.cuda()
        text = _in_fork(lambda: data[0] * 2)
        if text:
            raise RuntimeError(text)


class NumpyThroughDlpack(Exhibit):
    rule = "DEV-3"
    error = Exception  # BufferError or RuntimeError, by NumPy's version

    @staticmethod
    def faulty():
        return np.from_dlpack(torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        shared = torch.from_dlpack(torch.ones(3, device="cuda"))
        assert shared.is_cuda
        return np.from_dlpack(shared.cpu())


class ParallelOverMissingCard(Exhibit):
    rule = "DEV-5"
    error = AssertionError

    @staticmethod
    def faulty():
        return nn.DataParallel(nn.Linear(2, 2).cuda(), device_ids=[0, 63])  # fault

    @staticmethod
    def mended():
        return nn.DataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])


class MovedLeaf(Exhibit):
    """`.cuda()` of a tensor that requires a gradient is a copy: the optimiser wants the leaf."""

    rule = "DEV-9"
    error = ValueError
    ends = True

    @staticmethod
    def faulty():
        weight = torch.zeros(3, requires_grad=True).cuda()
        return torch.optim.SGD([weight], lr=0.1)  # fault

    @staticmethod
    def mended():
        weight = torch.zeros(3, device="cuda", requires_grad=True)
        return torch.optim.SGD([weight, nn.Parameter(torch.zeros(3).cuda())], lr=0.1)
