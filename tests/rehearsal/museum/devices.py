"""DEV-1: a tensor that stayed on the host meets one on the card."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .exhibit import Exhibit


class HostInputToLinear(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        model = nn.Linear(4, 2).to("cuda")
        return model(torch.randn(3, 4))  # fault

    @staticmethod
    def mended():
        model = nn.Linear(4, 2).to("cuda")
        return model(torch.randn(3, 4, device="cuda"))


class HostIdsToEmbedding(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        table = nn.Embedding(10, 4).cuda()
        return table(torch.tensor([1, 2]))  # fault

    @staticmethod
    def mended():
        table = nn.Embedding(10, 4).cuda()
        return table(torch.tensor([1, 2]).cuda())


class BagOffsetsOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        bag = nn.EmbeddingBag(10, 4).cuda()
        ids = torch.tensor([1, 2, 3, 4], device="cuda")
        return bag(ids, torch.tensor([0, 2]))  # fault

    @staticmethod
    def mended():
        bag = nn.EmbeddingBag(10, 4).cuda()
        ids = torch.tensor([1, 2, 3, 4], device="cuda")
        return bag(ids, torch.tensor([0, 2], device="cuda"))


class _BufferMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def forward(self, x):
        return x * self.scale * self.mask


class PlainAttributeMask(Exhibit):
    rule = "DEV-1"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])

        def forward(self, x):
            return x * self.scale * self.mask  # fault

    @staticmethod
    def faulty():
        return PlainAttributeMask.Model().to("cuda")(torch.ones(2, 4, device="cuda"))

    @staticmethod
    def mended():
        return _BufferMask().to("cuda")(torch.ones(2, 4, device="cuda"))


class PythonListOfLayers(Exhibit):
    rule = "DEV-1"

    class Model(nn.Module):
        def __init__(self, container):
            super().__init__()
            self.layers = container([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)  # fault
            return x

    @staticmethod
    def faulty():
        return PythonListOfLayers.Model(list).to("cuda")(torch.ones(2, 4, device="cuda"))

    @staticmethod
    def mended():
        return PythonListOfLayers.Model(nn.ModuleList).to("cuda")(torch.ones(2, 4, device="cuda"))


class HostPositions(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        tokens = torch.randint(0, 9, (2, 5), device="cuda")
        positions = nn.Embedding(16, 4).cuda()
        return positions(torch.arange(tokens.size(1)))  # fault

    @staticmethod
    def mended():
        tokens = torch.randint(0, 9, (2, 5), device="cuda")
        positions = nn.Embedding(16, 4).cuda()
        return positions(torch.arange(tokens.size(1), device=tokens.device))


class CatWithHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.ones(2, 3, device="cuda")
        return torch.cat([x, torch.zeros(2, 1)], dim=1)  # fault

    @staticmethod
    def mended():
        x = torch.ones(2, 3, device="cuda")
        return torch.cat([x, x.new_zeros(2, 1)], dim=1)


class StackScalarsOfBothSides(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        losses = [torch.ones((), device="cuda"), torch.tensor(0.5)]
        return torch.stack(losses).mean()  # fault

    @staticmethod
    def mended():
        losses = [torch.ones((), device="cuda"), torch.tensor(0.5, device="cuda")]
        return torch.stack(losses).mean()


class HostLossTarget(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        logits = torch.randn(3, 5, device="cuda", requires_grad=True)
        return F.cross_entropy(logits, torch.tensor([0, 1, 2]))  # fault

    @staticmethod
    def mended():
        logits = torch.randn(3, 5, device="cuda", requires_grad=True)
        return F.cross_entropy(logits, torch.tensor([0, 1, 2], device=logits.device))


class HostClassWeights(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]))
        logits, target = torch.randn(3, 3, device="cuda"), torch.tensor([0, 1, 2], device="cuda")
        return loss(logits, target)  # fault

    @staticmethod
    def mended():
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0])).cuda()
        logits, target = torch.randn(3, 3, device="cuda"), torch.tensor([0, 1, 2], device="cuda")
        return loss(logits, target)


class HostPositiveWeight(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        logits = torch.randn(3, 2, device="cuda")
        target = torch.ones(3, 2, device="cuda")
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.tensor([1.0, 2.0]))  # fault

    @staticmethod
    def mended():
        logits = torch.randn(3, 2, device="cuda")
        target = torch.ones(3, 2, device="cuda")
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.tensor([1.0, 2.0]).to(logits))


class HostLabelsInBinaryLoss(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        scores = torch.rand(4, device="cuda")
        return F.binary_cross_entropy(scores, torch.tensor([1.0, 0.0, 1.0, 0.0]))  # fault

    @staticmethod
    def mended():
        scores = torch.rand(4, device="cuda")
        return F.binary_cross_entropy(scores, torch.tensor([1.0, 0.0, 1.0, 0.0]).to(scores.device))


class GatherHostIndex(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        logits = torch.randn(2, 5, device="cuda")
        return logits.gather(1, torch.tensor([[0], [1]]))  # fault

    @staticmethod
    def mended():
        logits = torch.randn(2, 5, device="cuda")
        return logits.gather(1, torch.tensor([[0], [1]], device="cuda"))


class ScatterHostIndex(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        scores = torch.zeros(2, 5, device="cuda")
        return scores.scatter_(1, torch.tensor([[0], [1]]), 1.0)  # fault

    @staticmethod
    def mended():
        scores = torch.zeros(2, 5, device="cuda")
        return scores.scatter_(1, torch.tensor([[0], [1]], device="cuda"), 1.0)


class ScatterAddHostSource(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        total = torch.zeros(4, device="cuda")
        index = torch.tensor([0, 1, 1], device="cuda")
        return total.scatter_add_(0, index, torch.ones(3))  # fault

    @staticmethod
    def mended():
        total = torch.zeros(4, device="cuda")
        index = torch.tensor([0, 1, 1], device="cuda")
        return total.scatter_add_(0, index, torch.ones(3, device="cuda"))


class ScatterReduceIntoHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        values, index = torch.ones(3, device="cuda"), torch.tensor([0, 1, 1], device="cuda")
        return torch.zeros(4).scatter_reduce(0, index, values, "sum")  # fault

    @staticmethod
    def mended():
        values, index = torch.ones(3, device="cuda"), torch.tensor([0, 1, 1], device="cuda")
        return torch.zeros(4, device="cuda").scatter_reduce(0, index, values, "sum")


class IndexSelectHostIndex(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        items = torch.randn(6, 3, device="cuda")
        return items.index_select(0, torch.tensor([0, 2]))  # fault

    @staticmethod
    def mended():
        items = torch.randn(6, 3, device="cuda")
        return items.index_select(0, torch.tensor([0, 2], device="cuda"))


class IndexAddHostSource(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.zeros(4, 2, device="cuda")
        return x.index_add_(0, torch.tensor([0, 1], device="cuda"), torch.ones(2, 2))  # fault

    @staticmethod
    def mended():
        x = torch.zeros(4, 2, device="cuda")
        return x.index_add_(0, torch.tensor([0, 1], device="cuda"), torch.ones(2, 2, device="cuda"))


class AssignHostRows(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.zeros(4, 2, device="cuda")
        rows = torch.tensor([0, 1], device="cuda")
        x[rows] = torch.ones(2, 2)  # fault
        return x

    @staticmethod
    def mended():
        x = torch.zeros(4, 2, device="cuda")
        rows = torch.tensor([0, 1], device="cuda")
        x[rows] = torch.ones(2, 2, device="cuda")
        x[1:3] = torch.ones(2, 2)  # a copy may cross devices
        return x


class AccumulateHostValue(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.zeros(4, device="cuda")
        return x.index_put_((torch.tensor([0, 0], device="cuda"),), torch.ones(2), accumulate=True)  # fault

    @staticmethod
    def mended():
        x = torch.zeros(4, device="cuda")
        rows = (torch.tensor([0, 0], device="cuda"),)
        x.index_put_(rows, torch.tensor(1.0), accumulate=True)  # a 0-dim host value is moved
        x[x > 0] = torch.tensor([2.0])  # one host number fills a mask
        return x.index_put_(rows, torch.ones(2, device="cuda"), accumulate=True)


class TakeAlongHostIndex(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        scores = torch.randn(2, 4, device="cuda")
        order = scores.cpu().argsort(dim=1)
        return torch.take_along_dim(scores, order, dim=1)  # fault

    @staticmethod
    def mended():
        scores = torch.randn(2, 4, device="cuda")
        return torch.take_along_dim(scores, scores.argsort(dim=1), dim=1)


class SparseTimesHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        graph = torch.eye(4).to_sparse().to("cuda")
        return torch.sparse.mm(graph, torch.ones(4, 2))  # fault

    @staticmethod
    def mended():
        graph = torch.eye(4).to_sparse().to("cuda")
        return torch.sparse.mm(graph, torch.ones(4, 2, device="cuda"))


class HostGraphTimesDevice(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        graph = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 1.0], (2, 2))
        nodes = nn.Embedding(2, 3).cuda()
        return torch.sparse.mm(graph, nodes.weight)  # fault

    @staticmethod
    def mended():
        graph = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 1.0], (2, 2), device="cuda")
        nodes = nn.Embedding(2, 3).cuda()
        return torch.sparse.mm(graph, nodes.weight)


class ClampWithHostBounds(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.randn(4, device="cuda")
        return torch.clamp(x, torch.tensor(0.0), torch.tensor(1.0))  # fault

    @staticmethod
    def mended():
        x = torch.randn(4, device="cuda")
        return torch.clamp(x, torch.tensor(0.0, device="cuda"), torch.tensor(1.0, device="cuda"))


class AttentionMaskOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        q = torch.randn(1, 2, 4, 8, device="cuda")
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=causal)  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 2, 4, 8, device="cuda")
        causal = torch.ones(4, 4, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=causal)


class PaddingMaskOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        attention = nn.MultiheadAttention(8, 2, batch_first=True).cuda()
        x = torch.randn(2, 4, 8, device="cuda")
        padding = torch.zeros(2, 4, dtype=torch.bool)
        return attention(x, x, x, key_padding_mask=padding)[0]  # fault

    @staticmethod
    def mended():
        attention = nn.MultiheadAttention(8, 2, batch_first=True).cuda()
        x = torch.randn(2, 4, 8, device="cuda")
        padding = torch.zeros(2, 4, dtype=torch.bool, device="cuda")
        return attention(x, x, x, key_padding_mask=padding)[0]


class AdditiveMaskOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        scores = torch.randn(2, 4, 4, device="cuda")
        causal = torch.full((4, 4), float("-inf")).triu(1)
        return (scores + causal).softmax(-1)  # fault

    @staticmethod
    def mended():
        scores = torch.randn(2, 4, 4, device="cuda")
        causal = torch.full((4, 4), float("-inf"), device=scores.device).triu(1)
        return (scores + causal).softmax(-1)


class MaskedFillHostMask(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        scores = torch.randn(3, 4, device="cuda")
        seen = torch.zeros(3, 4, dtype=torch.bool)
        return scores.masked_fill(seen, -1e9)  # fault

    @staticmethod
    def mended():
        scores = torch.randn(3, 4, device="cuda")
        seen = torch.zeros(3, 4, dtype=torch.bool, device="cuda")
        return scores.masked_fill(seen, torch.tensor(-1e9))  # a 0-dim host value is legal


class WhereHostBranch(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.randn(3, device="cuda")
        return torch.where(x > 0, x, torch.zeros(3))  # fault

    @staticmethod
    def mended():
        x = torch.randn(3, device="cuda")
        return torch.where(x > 0, x, torch.tensor(0.0))  # a 0-dim host branch is moved


class EmaShadowOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        model = nn.Linear(3, 3)
        shadow = copy.deepcopy(model)
        model.to("cuda")
        for average, current in zip(shadow.parameters(), model.parameters(), strict=True):
            average.data.mul_(0.9).add_(current.data, alpha=0.1)  # fault

    @staticmethod
    def mended():
        model = nn.Linear(3, 3).to("cuda")
        shadow = copy.deepcopy(model)
        for average, current in zip(shadow.parameters(), model.parameters(), strict=True):
            average.data.mul_(0.9).add_(current.data, alpha=0.1)


class LerpTowardsHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        weight = torch.zeros(3, device="cuda")
        return torch.lerp(weight, torch.ones(3), 0.1)  # fault

    @staticmethod
    def mended():
        weight = torch.zeros(3, device="cuda")
        return torch.lerp(weight, torch.ones(3, device="cuda"), 0.1)


class OptimizerStateOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        model = nn.Linear(3, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.shape)
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        optimizer.step()  # fault

    @staticmethod
    def mended():
        model = nn.Linear(3, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        optimizer.step()


class HostAccumulator(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        hits = torch.zeros(5)
        hits += torch.ones(5, device="cuda")  # fault
        return hits

    @staticmethod
    def mended():
        hits = torch.zeros(5)
        hits += torch.ones(5, device="cuda").cpu()
        return hits


class HostScalarAccumulator(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        total = torch.zeros(())
        total += torch.ones((), device="cuda")  # fault
        return total

    @staticmethod
    def mended():
        total = torch.zeros(())
        total = total + torch.ones((), device="cuda")  # out of place, the result goes to the card
        return total


class UnassignedTo(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        model = nn.Linear(3, 2).cuda()
        batch = torch.ones(2, 3)
        batch.to("cuda")
        return model(batch)  # fault

    @staticmethod
    def mended():
        model = nn.Linear(3, 2).cuda()
        batch = torch.ones(2, 3)
        batch = batch.to("cuda")
        return model(batch)


class HostGradient(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.zeros(3)  # fault

    @staticmethod
    def mended():
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.zeros(3, device="cuda")


class BatchedProductWithHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        users, items = torch.randn(2, 1, 4, device="cuda"), torch.randn(2, 4, 3)
        return torch.bmm(users, items)  # fault

    @staticmethod
    def mended():
        users, items = torch.randn(2, 1, 4, device="cuda"), torch.randn(2, 4, 3, device="cuda")
        return torch.bmm(users, items)


class EinsumWithHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.randn(2, 3, device="cuda")
        return torch.einsum("bi,ij->bj", x, torch.randn(3, 4))  # fault

    @staticmethod
    def mended():
        x = torch.randn(2, 3, device="cuda")
        return torch.einsum("bi,ij->bj", x, torch.randn(3, 4, device="cuda"))


class VectorProductWithHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        items = torch.randn(5, 3, device="cuda")
        return items @ torch.randn(3)  # fault

    @staticmethod
    def mended():
        items = torch.randn(5, 3, device="cuda")
        return items @ torch.randn(3, device="cuda")


class NormWeightOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        norm = nn.LayerNorm(4)
        return norm(torch.randn(2, 4, device="cuda"))  # fault

    @staticmethod
    def mended():
        norm = nn.LayerNorm(4).cuda()
        return norm(torch.randn(2, 4, device="cuda"))


class BatchNormOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        norm = nn.BatchNorm1d(4)
        return norm(torch.randn(3, 4, device="cuda"))  # fault

    @staticmethod
    def mended():
        norm = nn.BatchNorm1d(4).to("cuda")
        return norm(torch.randn(3, 4, device="cuda"))


class ConvolutionInputOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        conv = nn.Conv1d(2, 3, 3).cuda()
        return conv(torch.randn(1, 2, 8))  # fault

    @staticmethod
    def mended():
        conv = nn.Conv1d(2, 3, 3).cuda()
        return conv(torch.randn(1, 2, 8).cuda())


class BoundariesOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        prices = torch.rand(5, device="cuda")
        return torch.bucketize(prices, torch.tensor([0.2, 0.5]))  # fault

    @staticmethod
    def mended():
        prices = torch.rand(5, device="cuda")
        return torch.bucketize(prices, torch.tensor([0.2, 0.5], device="cuda"))


class SearchHostSequence(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        cdf = torch.tensor([0.2, 0.5, 1.0])
        return torch.searchsorted(cdf, torch.rand(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        cdf = torch.tensor([0.2, 0.5, 1.0], device="cuda")
        return torch.searchsorted(cdf, torch.rand(3, device="cuda"))


class TooManyHostScalars(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.randn(3, device="cuda")
        return torch.addcmul(x, torch.tensor(0.5), torch.tensor(2.0))  # fault

    @staticmethod
    def mended():
        x = torch.randn(3, device="cuda")
        return torch.addcmul(x, torch.tensor(0.5), torch.tensor(2.0, device="cuda"))


class RotaryTablesOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        q = torch.randn(1, 4, 8, device="cuda")
        angles = torch.outer(torch.arange(4.0), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        return q[..., ::2] * angles.cos()  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 4, 8, device="cuda")
        steps = torch.arange(4.0, device="cuda")
        angles = torch.outer(steps, 1.0 / 10000 ** (torch.arange(0, 8, 2, device="cuda") / 8))
        return q[..., ::2] * angles.cos()


class CodebookOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        residual, codebook = torch.randn(4, 3, device="cuda"), torch.randn(8, 3)
        return torch.cdist(residual, codebook).argmin(1)  # fault

    @staticmethod
    def mended():
        residual, codebook = torch.randn(4, 3, device="cuda"), torch.randn(8, 3, device="cuda")
        return torch.cdist(residual, codebook).argmin(1)


class CacheOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        cache = torch.zeros(1, 8, 4)
        keys = torch.randn(1, 1, 4, device="cuda")
        return cache.index_copy_(1, torch.tensor([0], device="cuda"), keys)  # fault

    @staticmethod
    def mended():
        cache = torch.zeros(1, 8, 4, device="cuda")
        keys = torch.randn(1, 1, 4, device="cuda")
        return cache.index_copy_(1, torch.tensor([0], device="cuda"), keys)


class SeenItemsOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        candidates = torch.tensor([1, 2, 3], device="cuda")
        return torch.isin(candidates, torch.tensor([2]))  # fault

    @staticmethod
    def mended():
        candidates = torch.tensor([1, 2, 3], device="cuda")
        return torch.isin(candidates, torch.tensor([2], device="cuda"))


class FromNumpyOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        features = torch.from_numpy(np.ones((2, 3), dtype=np.float32))
        return torch.randn(4, 3, device="cuda") @ features.T  # fault

    @staticmethod
    def mended():
        features = torch.from_numpy(np.ones((2, 3), dtype=np.float32)).to("cuda")
        return torch.randn(4, 3, device="cuda") @ features.T


class LayerMadeInForward(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.randn(2, 3, device="cuda")
        return nn.Linear(3, 3)(x)  # fault

    @staticmethod
    def mended():
        x = torch.randn(2, 3, device="cuda")
        return nn.Linear(3, 3, device=x.device)(x)


class PartlyMovedBatch(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        batch = {"history": torch.ones(2, 3), "target": torch.ones(2, 3)}
        history = batch["history"].cuda()
        return (history * batch["target"]).sum()  # fault

    @staticmethod
    def mended():
        batch = {"history": torch.ones(2, 3), "target": torch.ones(2, 3)}
        batch = {name: tensor.cuda() for name, tensor in batch.items()}
        return (batch["history"] * batch["target"]).sum()


class MetricComparesSides(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        labels = torch.tensor([0, 1, 1])
        predicted = torch.randn(3, 2, device="cuda").argmax(1)
        return (predicted == labels).float().mean()  # fault

    @staticmethod
    def mended():
        labels = torch.tensor([0, 1, 1])
        predicted = torch.randn(3, 2, device="cuda").argmax(1)
        return (predicted.cpu() == labels).float().mean()


class TargetDistributionOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        student = torch.randn(2, 4, device="cuda").log_softmax(-1)
        teacher = torch.randn(2, 4).softmax(-1)
        return F.kl_div(student, teacher, reduction="batchmean")  # fault

    @staticmethod
    def mended():
        student = torch.randn(2, 4, device="cuda").log_softmax(-1)
        teacher = torch.randn(2, 4).softmax(-1).to("cuda")
        return F.kl_div(student, teacher, reduction="batchmean")


class ExpertBufferOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        gates = torch.rand(4, 2, device="cuda")
        outputs = torch.zeros(4, 3)
        return outputs.addcmul_(gates[:, :1], torch.ones(4, 3, device="cuda"))  # fault

    @staticmethod
    def mended():
        gates = torch.rand(4, 2, device="cuda")
        outputs = torch.zeros(4, 3, device="cuda")
        return outputs.addcmul_(gates[:, :1], torch.ones(4, 3, device="cuda"))


class BackwardGradientOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.ones(3, device="cuda", requires_grad=True)
        return (x * 2.0).backward(torch.ones(3))  # fault

    @staticmethod
    def mended():
        x = torch.ones(3, device="cuda", requires_grad=True)
        return (x * 2.0).backward(torch.ones(3, device="cuda"))


class MeshOfBothSides(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        rows = torch.arange(3, device="cuda")
        return torch.meshgrid(rows, torch.arange(4), indexing="ij")  # fault

    @staticmethod
    def mended():
        rows = torch.arange(3, device="cuda")
        return torch.meshgrid(rows, torch.arange(4, device="cuda"), indexing="ij")


class EdgesOnDeviceWeightsOnHost(Exhibit):
    """A graph is built from device edges; without `device=` nothing is moved."""

    rule = "DEV-1"

    @staticmethod
    def faulty():
        edges = torch.tensor([[0, 1], [1, 0]], device="cuda")
        return torch.sparse_coo_tensor(edges, torch.ones(2), (2, 2))  # fault

    @staticmethod
    def mended():
        edges = torch.tensor([[0, 1], [1, 0]], device="cuda")
        moved = torch.sparse_coo_tensor(edges, torch.ones(2), (2, 2), device="cuda")
        graph = torch.sparse_coo_tensor(edges, torch.ones(2, device="cuda"), (2, 2)).coalesce()
        assert graph.is_cuda
        assert graph.layout is torch.sparse_coo
        return torch.sparse.mm(graph, torch.ones(2, 3, device="cuda")) + moved.to_dense().sum()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return torch.full(first.shape, 2.0, device=ctx.place) * (first + second).to(ctx.place), None


class HostGradientOfFunction(Exhibit):
    """A custom backward makes its gradient without `device=`."""

    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.ones(3, device="cuda", requires_grad=True)
        doubled, _ = _Doubled.apply(x, "cpu")
        doubled.sum().backward()  # fault

    @staticmethod
    def mended():
        x = torch.ones(3, device="cuda", requires_grad=True)
        doubled, _ = _Doubled.apply(x, "cuda")
        doubled.sum().backward()
        return x.grad


class HostGradientOfHook(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: gradient.cpu().clamp(-1, 1))
        y.sum().backward()  # fault

    @staticmethod
    def mended():
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        y.sum().backward()
        return x.grad


class ParallelModuleOnHost(Exhibit):
    rule = "DEV-1"

    @staticmethod
    def faulty():
        model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0])
        return model(torch.ones(2, 3, device="cuda"))  # fault

    @staticmethod
    def mended():
        model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0]).cuda()
        return model(torch.ones(2, 3))  # inputs are scattered from the host


class VectorOfScatteredParameters(Exhibit):
    rule = "DEV-1"
    error = TypeError
    ends = True

    @staticmethod
    def faulty():
        model = nn.Sequential(nn.Linear(2, 2).cuda(), nn.Linear(2, 2))
        return nn.utils.parameters_to_vector(model.parameters())  # fault

    @staticmethod
    def mended():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
        return nn.utils.parameters_to_vector(model.parameters())
