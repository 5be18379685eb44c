"""RNN, KRN, LIN, DTY, AMP, SDP: kernels with preconditions, missing kernels, dtype boundaries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence

from .exhibit import Exhibit

# --- recurrent layers ------------------------------------------------------------------------------------------------


class TransposedHiddenState(Exhibit):
    rule = "RNN-1"

    @staticmethod
    def faulty():
        gru = nn.GRU(4, 6, num_layers=2, batch_first=True).cuda()
        users = torch.zeros(3, 2, 6, device="cuda")
        return gru(torch.randn(3, 5, 4, device="cuda"), users.transpose(0, 1))  # fault

    @staticmethod
    def mended():
        gru = nn.GRU(4, 6, num_layers=2, batch_first=True).cuda()
        users = torch.zeros(3, 2, 6, device="cuda")
        return gru(torch.randn(3, 5, 4, device="cuda"), users.transpose(0, 1).contiguous())


class TransposedCellState(Exhibit):
    rule = "RNN-1"

    @staticmethod
    def faulty():
        lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True).cuda()
        hidden = torch.zeros(2, 3, 6, device="cuda")
        cell = torch.zeros(3, 2, 6, device="cuda").transpose(0, 1)
        return lstm(torch.randn(3, 5, 4, device="cuda"), (hidden, cell))  # fault

    @staticmethod
    def mended():
        lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True).cuda()
        hidden = torch.zeros(2, 3, 6, device="cuda")
        cell = torch.zeros(3, 2, 6, device="cuda").transpose(0, 1).contiguous()
        return lstm(torch.randn(3, 5, 4, device="cuda"), (hidden, cell))


class ExpandedInitialState(Exhibit):
    rule = "RNN-1"

    @staticmethod
    def faulty():
        rnn = nn.RNN(4, 6, num_layers=2, batch_first=True).cuda()
        start = nn.Parameter(torch.zeros(2, 1, 6, device="cuda"))
        return rnn(torch.randn(3, 5, 4, device="cuda"), start.expand(-1, 3, -1))  # fault

    @staticmethod
    def mended():
        rnn = nn.RNN(4, 6, num_layers=2, batch_first=True).cuda()
        start = nn.Parameter(torch.zeros(2, 1, 6, device="cuda"))
        return rnn(torch.randn(3, 5, 4, device="cuda"), start.expand(-1, 3, -1).contiguous())


class SlicedBidirectionalState(Exhibit):
    rule = "RNN-1"

    @staticmethod
    def faulty():
        decoder = nn.GRU(4, 6, num_layers=2).cuda()
        encoded = torch.zeros(2, 3, 12, device="cuda")
        return decoder(torch.randn(5, 3, 4, device="cuda"), encoded[:, :, :6])  # fault

    @staticmethod
    def mended():
        decoder = nn.GRU(4, 6, num_layers=2).cuda()
        encoded = torch.zeros(2, 3, 12, device="cuda")
        return decoder(torch.randn(5, 3, 4, device="cuda"), encoded[:, :, :6].contiguous())


class DeviceLengths(Exhibit):
    rule = "RNN-2"

    @staticmethod
    def faulty():
        x, lengths = torch.randn(2, 5, 4, device="cuda"), torch.tensor([5, 3], device="cuda")
        return pack_padded_sequence(x, lengths, batch_first=True)  # fault

    @staticmethod
    def mended():
        x, lengths = torch.randn(2, 5, 4, device="cuda"), torch.tensor([5, 3], device="cuda")
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return nn.GRU(4, 6, batch_first=True).cuda()(packed)


class HiddenStateOnHost(Exhibit):
    rule = "RNN-3"

    @staticmethod
    def faulty():
        gru = nn.GRU(4, 6, batch_first=True).cuda()
        return gru(torch.randn(3, 5, 4, device="cuda"), torch.zeros(1, 3, 6))  # fault

    @staticmethod
    def mended():
        gru = nn.GRU(4, 6, batch_first=True).cuda()
        x = torch.randn(3, 5, 4, device="cuda")
        return gru(x, x.new_zeros(1, 3, 6))


class SequenceOnHost(Exhibit):
    rule = "RNN-3"

    @staticmethod
    def faulty():
        lstm = nn.LSTM(4, 6, batch_first=True).cuda()
        state = torch.zeros(1, 3, 6, device="cuda")
        return lstm(torch.randn(3, 5, 4), (state, state))  # fault

    @staticmethod
    def mended():
        lstm = nn.LSTM(4, 6, batch_first=True).cuda()
        state = torch.zeros(1, 3, 6, device="cuda")
        return lstm(torch.randn(3, 5, 4, device="cuda"), (state, state))


class RecurrentWeightsOnHost(Exhibit):
    rule = "RNN-3"

    @staticmethod
    def faulty():
        gru = nn.GRU(4, 6, batch_first=True)
        return gru(torch.randn(3, 5, 4, device="cuda"))  # fault

    @staticmethod
    def mended():
        gru = nn.GRU(4, 6, batch_first=True).cuda()
        return gru(torch.randn(3, 5, 4, device="cuda"))


# --- kernels ---------------------------------------------------------------------------------------------------------


class HistogramOnDevice(Exhibit):
    rule = "KRN-1"
    error = NotImplementedError

    @staticmethod
    def faulty():
        return torch.histogram(torch.rand(20, device="cuda"), bins=4)  # fault

    @staticmethod
    def mended():
        return torch.histc(torch.rand(20, device="cuda"), bins=4)


class HistogramOfManyDimensions(Exhibit):
    rule = "KRN-1"
    error = NotImplementedError

    @staticmethod
    def faulty():
        return torch.histogramdd(torch.rand(20, 2, device="cuda"), bins=[3, 3])  # fault

    @staticmethod
    def mended():
        return torch.histogramdd(torch.rand(20, 2, device="cuda").cpu(), bins=[3, 3])


class MkldnnOfDevice(Exhibit):
    rule = "KRN-1"
    error = RuntimeError

    @staticmethod
    def faulty():
        return torch.rand(3, 3, device="cuda").to_mkldnn()  # fault

    @staticmethod
    def mended():
        return torch.rand(3, 3, device="cuda").to_sparse()


class SparseReduceOnDevice(Exhibit):
    rule = "KRN-1"
    error = NotImplementedError

    @staticmethod
    def faulty():
        graph = torch.eye(3, device="cuda").to_sparse_csr()
        return torch.sparse.mm(graph, torch.rand(3, 2, device="cuda"), "mean")  # fault

    @staticmethod
    def mended():
        graph = torch.eye(3, device="cuda").to_sparse_csr()
        return torch.sparse.mm(graph, torch.rand(3, 2, device="cuda"))


class IntegerMatrixProduct(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        counts = torch.ones(3, 3, dtype=torch.int64, device="cuda")
        return counts @ counts  # fault

    @staticmethod
    def mended():
        counts = torch.ones(3, 3, dtype=torch.int64, device="cuda")
        return (counts.float() @ counts.float()).long()


class IntegerBatchedProduct(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        counts = torch.ones(2, 3, 3, dtype=torch.int32, device="cuda")
        return torch.bmm(counts, counts)  # fault

    @staticmethod
    def mended():
        counts = torch.ones(2, 3, 3, dtype=torch.int32, device="cuda")
        return torch.bmm(counts.float(), counts.float())


class IntegerDot(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        ids = torch.arange(4, device="cuda")
        return torch.dot(ids, ids)  # fault

    @staticmethod
    def mended():
        ids = torch.arange(4, device="cuda")
        return (ids * ids).sum()


class IntegerPowersOfBase(Exhibit):
    """Codes of a semantic id folded into one number by a matrix-vector product."""

    rule = "KRN-2"

    @staticmethod
    def faulty():
        codes = torch.randint(0, 8, (5, 3), device="cuda")
        return codes.mv(torch.tensor([64, 8, 1], device="cuda"))  # fault

    @staticmethod
    def mended():
        codes = torch.randint(0, 8, (5, 3), device="cuda")
        return (codes * torch.tensor([64, 8, 1], device="cuda")).sum(-1)


class IntegerEinsum(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        seen = torch.ones(2, 4, dtype=torch.int64, device="cuda")
        return torch.einsum("ui,vi->uv", seen, seen)  # fault

    @staticmethod
    def mended():
        seen = torch.ones(2, 4, dtype=torch.int64, device="cuda")
        return torch.einsum("ui,vi->uv", seen.float(), seen.float())


class IntegerConvolution(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        board = torch.ones(1, 1, 4, 4, dtype=torch.int64, device="cuda")
        kernel = torch.ones(1, 1, 2, 2, dtype=torch.int64, device="cuda")
        return F.conv2d(board, kernel)  # fault

    @staticmethod
    def mended():
        board = torch.ones(1, 1, 4, 4, dtype=torch.int64, device="cuda")
        kernel = torch.ones(1, 1, 2, 2, dtype=torch.int64, device="cuda")
        return F.conv2d(board.float(), kernel.float())


class IntegerAveragePool(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        return F.avg_pool2d(torch.ones(1, 1, 4, 4, dtype=torch.int64, device="cuda"), 2)  # fault

    @staticmethod
    def mended():
        return F.avg_pool2d(torch.ones(1, 1, 4, 4, dtype=torch.int64, device="cuda").float(), 2)


class IntegerMaxPool(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        return F.max_pool2d(torch.ones(1, 1, 4, 4, dtype=torch.int32, device="cuda"), 2)  # fault

    @staticmethod
    def mended():
        return F.max_pool2d(torch.ones(1, 1, 4, 4, dtype=torch.int32, device="cuda").float(), 2)


class HalfHistogram(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        return torch.histc(torch.rand(8, device="cuda").bfloat16(), bins=4)  # fault

    @staticmethod
    def mended():
        return torch.histc(torch.rand(8, device="cuda").bfloat16().float(), bins=4)


class HalfIncompleteGamma(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        a = torch.rand(4, device="cuda").half()
        return torch.special.gammainc(a, a)  # fault

    @staticmethod
    def mended():
        a = torch.rand(4, device="cuda").half()
        return torch.special.gammainc(a.float(), a.float())


class Float8OnAmpere(Exhibit):
    rule = "KRN-3"

    @staticmethod
    def faulty():
        a = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # fault

    @staticmethod
    def mended():
        a = torch.ones(16, 16, device="cuda").bfloat16()
        return a @ a.t()


class HalfTransformOfOddSize(Exhibit):
    rule = "KRN-4"

    @staticmethod
    def faulty():
        return torch.fft.rfft(torch.randn(2, 12, device="cuda").half())  # fault

    @staticmethod
    def mended():
        return torch.fft.rfft(torch.randn(2, 12, device="cuda").half().float())


class BfloatTransform(Exhibit):
    rule = "KRN-4"

    @staticmethod
    def faulty():
        return torch.fft.fft2(torch.randn(2, 8, 8, device="cuda").bfloat16())  # fault

    @staticmethod
    def mended():
        return torch.fft.fft2(torch.randn(2, 8, 8, device="cuda").bfloat16().float())


class LeastSquaresDriver(Exhibit):
    rule = "LIN-1"

    @staticmethod
    def faulty():
        a, b = torch.randn(4, 3, device="cuda"), torch.randn(4, 1, device="cuda")
        return torch.linalg.lstsq(a, b, driver="gelsd").solution  # fault

    @staticmethod
    def mended():
        a, b = torch.randn(4, 3, device="cuda"), torch.randn(4, 1, device="cuda")
        return torch.linalg.lstsq(a, b).solution


# --- dtype boundaries ------------------------------------------------------------------------------------------------


class CheckpointStatesIntoFloatHead(Exhibit):
    """A bfloat16 checkpoint's states are fed straight into a float32 head."""

    rule = "DTY-1"

    @staticmethod
    def faulty():
        states = torch.randn(2, 4, device="cuda").bfloat16()
        head = nn.Linear(4, 2).cuda()
        return head(states)  # fault

    @staticmethod
    def mended():
        states = torch.randn(2, 4, device="cuda").bfloat16()
        head = nn.Linear(4, 2).cuda()
        return head(states.to(head.weight.dtype))


class RebuiltInt8Weight(Exhibit):
    """Weight-only int8 rebuilds its weight as float32 beside bfloat16 activations."""

    rule = "DTY-1"

    @staticmethod
    def _quantised():
        weight = torch.randn(3, 4, device="cuda")
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round().to(torch.int8), scale

    @staticmethod
    def faulty():
        codes, scale = RebuiltInt8Weight._quantised()
        activations = torch.randn(2, 4, device="cuda").bfloat16()
        return F.linear(activations, codes.float() * scale)  # fault

    @staticmethod
    def mended():
        codes, scale = RebuiltInt8Weight._quantised()
        activations = torch.randn(2, 4, device="cuda").bfloat16()
        return F.linear(activations, (codes.float() * scale).to(activations))


class HalfImageIntoFloatConvolution(Exhibit):
    rule = "DTY-1"

    @staticmethod
    def faulty():
        conv = nn.Conv2d(1, 2, 3).cuda()
        return conv(torch.randn(1, 1, 6, 6, device="cuda").bfloat16())  # fault

    @staticmethod
    def mended():
        conv = nn.Conv2d(1, 2, 3).cuda().bfloat16()
        return conv(torch.randn(1, 1, 6, 6, device="cuda").bfloat16())


class LanguageStateIntoRecommender(Exhibit):
    rule = "DTY-1"

    @staticmethod
    def faulty():
        user = torch.randn(2, 4, device="cuda").bfloat16()
        items = torch.randn(5, 4, device="cuda")
        return user @ items.T  # fault

    @staticmethod
    def mended():
        user = torch.randn(2, 4, device="cuda").bfloat16()
        items = torch.randn(5, 4, device="cuda")
        return user.float() @ items.T


class AssignAcrossDtypes(Exhibit):
    rule = "DTY-1"

    @staticmethod
    def faulty():
        memory = torch.zeros(4, 2, device="cuda")
        memory[torch.tensor([0, 1], device="cuda")] = torch.ones(2, 2, device="cuda").bfloat16()  # fault
        return memory

    @staticmethod
    def mended():
        memory = torch.zeros(4, 2, device="cuda")
        memory[torch.tensor([0, 1], device="cuda")] = torch.ones(2, 2, device="cuda").bfloat16().to(memory.dtype)
        return memory


class HalfSequenceIntoFloatRecurrence(Exhibit):
    rule = "DTY-1"
    error = ValueError

    @staticmethod
    def faulty():
        gru = nn.GRU(4, 6, batch_first=True).cuda()
        return gru(torch.randn(3, 5, 4, device="cuda").bfloat16())  # fault

    @staticmethod
    def mended():
        gru = nn.GRU(4, 6, batch_first=True).cuda()
        return gru(torch.randn(3, 5, 4, device="cuda").bfloat16().float())


class LowRankAdapterInFloat(Exhibit):
    rule = "DTY-1"

    @staticmethod
    def faulty():
        x = torch.randn(2, 1, 4, device="cuda").bfloat16()
        a = torch.randn(2, 4, 2, device="cuda")
        return torch.bmm(x, a)  # fault

    @staticmethod
    def mended():
        x = torch.randn(2, 1, 4, device="cuda").bfloat16()
        a = torch.randn(2, 4, 2, device="cuda").to(x.dtype)
        return torch.bmm(x, a)


class MixedLayerNorm(Exhibit):
    rule = "DTY-2"

    @staticmethod
    def faulty():
        norm = nn.LayerNorm(4).cuda()
        return norm(torch.randn(2, 4, device="cuda").bfloat16())  # fault

    @staticmethod
    def mended():
        norm = nn.LayerNorm(4).cuda()
        return norm(torch.randn(2, 4, device="cuda").bfloat16().float())


class MixedGroupNorm(Exhibit):
    rule = "DTY-2"

    @staticmethod
    def faulty():
        norm = nn.GroupNorm(2, 4).cuda()
        return norm(torch.randn(2, 4, 3, device="cuda").bfloat16())  # fault

    @staticmethod
    def mended():
        norm = nn.GroupNorm(2, 4).cuda().bfloat16()
        return norm(torch.randn(2, 4, 3, device="cuda").bfloat16())


class FillOverflowsHalf(Exhibit):
    rule = "DTY-3"

    @staticmethod
    def faulty():
        x = torch.randn(2, 4, device="cuda")
        mask = torch.ones(2, 2, dtype=torch.bool, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            scores = x @ x.T
            return scores.masked_fill(mask, -1e9)  # fault

    @staticmethod
    def mended():
        x = torch.randn(2, 4, device="cuda")
        mask = torch.ones(2, 2, dtype=torch.bool, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            scores = x @ x.T
            return scores.masked_fill(mask, torch.finfo(scores.dtype).min)


class InPlaceFillOverflowsHalf(Exhibit):
    rule = "DTY-3"

    @staticmethod
    def faulty():
        scores = torch.randn(2, 4, device="cuda").half()
        scores.masked_fill_(scores > 0, -1e10)  # fault
        return scores

    @staticmethod
    def mended():
        scores = torch.randn(2, 4, device="cuda").half()
        scores.masked_fill_(scores > 0, float("-inf"))
        return scores


# --- automatic mixed precision ---------------------------------------------------------------------------------------


class ProbabilityLossUnderAutocast(Exhibit):
    rule = "AMP-1"

    @staticmethod
    def faulty():
        model = nn.Linear(4, 1).cuda()
        with torch.autocast("cuda"):
            probability = torch.sigmoid(model(torch.randn(3, 4, device="cuda")))
            return F.binary_cross_entropy(probability, torch.ones(3, 1, device="cuda"))  # fault

    @staticmethod
    def mended():
        model = nn.Linear(4, 1).cuda()
        with torch.autocast("cuda"):
            logits = model(torch.randn(3, 4, device="cuda"))
            return F.binary_cross_entropy_with_logits(logits, torch.ones(3, 1, device="cuda"))


class LossModuleUnderAutocast(Exhibit):
    rule = "AMP-1"

    @staticmethod
    def faulty():
        loss = nn.BCELoss()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss(torch.rand(3, device="cuda"), torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        loss = nn.BCELoss()
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
            return loss(torch.rand(3, device="cuda"), torch.ones(3, device="cuda"))


class ScalerWithBfloatGradients(Exhibit):
    rule = "AMP-2"

    @staticmethod
    def faulty():
        model = nn.Linear(4, 1).cuda().bfloat16()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        scaler.scale(model(torch.ones(2, 4, device="cuda").bfloat16()).sum()).backward()
        scaler.step(optimizer)  # fault
        scaler.update()

    @staticmethod
    def mended():
        model = nn.Linear(4, 1).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4, device="cuda").bfloat16()).sum().backward()
        optimizer.step()


# --- attention back-ends ---------------------------------------------------------------------------------------------


class FlashInFloat32(Exhibit):
    rule = "SDP-1"

    @staticmethod
    def faulty():
        q = torch.randn(1, 2, 4, 8, device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q)  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 2, 4, 8, device="cuda")
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, q, q)


class FlashWithMask(Exhibit):
    rule = "SDP-1"

    @staticmethod
    def faulty():
        q = torch.randn(1, 2, 4, 8, device="cuda").bfloat16()
        mask = torch.zeros(4, 4, device="cuda").bfloat16()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 2, 4, 8, device="cuda").bfloat16()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)


class FlashWithWideHeads(Exhibit):
    rule = "SDP-1"

    @staticmethod
    def faulty():
        q = torch.randn(1, 1, 4, 512, device="cuda").bfloat16()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, q, q)  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 1, 4, 512, device="cuda").bfloat16()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, q, q)


class FloatMaskForHalfQuery(Exhibit):
    rule = "SDP-2"

    @staticmethod
    def faulty():
        q = torch.randn(1, 2, 4, 8, device="cuda").bfloat16()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4, device="cuda"))  # fault

    @staticmethod
    def mended():
        q = torch.randn(1, 2, 4, 8, device="cuda").bfloat16()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4, device="cuda").to(q.dtype))


# --- backward of recurrent layers ------------------------------------------------------------------------------------


class SaliencyOfEvaluatedRecurrence(Exhibit):
    """Attributions ask an evaluated model for input gradients; cuDNN kept nothing for them."""

    rule = "RNN-4"

    @staticmethod
    def faulty():
        lstm = nn.LSTM(3, 4).cuda().eval()
        x = torch.rand(5, 2, 3, device="cuda", requires_grad=True)
        lstm(x)[0].sum().backward()  # fault

    @staticmethod
    def mended():
        lstm = nn.LSTM(3, 4).cuda().eval()
        x = torch.rand(5, 2, 3, device="cuda", requires_grad=True)
        lstm(x)  # the forward alone is legal
        with torch.backends.cudnn.flags(enabled=False):
            lstm(x)[0].sum().backward()
        lstm.train()
        lstm(x)[0].sum().backward()
        return x.grad


class GradientPenaltyOfRecurrence(Exhibit):
    rule = "RNN-4"

    @staticmethod
    def faulty():
        critic = nn.GRU(3, 4).cuda()
        x = torch.rand(5, 2, 3, device="cuda", requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x)[0].sum(), x, create_graph=True)
        slope.pow(2).sum().backward()  # fault

    @staticmethod
    def mended():
        critic = nn.GRU(3, 4).cuda()
        x = torch.rand(5, 2, 3, device="cuda", requires_grad=True)
        with torch.backends.cudnn.flags(enabled=False):
            (slope,) = torch.autograd.grad(critic(x)[0].sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return x.grad


# --- more kernels ----------------------------------------------------------------------------------------------------


class InverseOfAutocastProduct(Exhibit):
    """Autocast hands a half-precision product to a solver, which has none."""

    rule = "KRN-2"
    ends = True

    @staticmethod
    def faulty():
        x = torch.eye(3, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            covariance = x @ x
        return torch.linalg.inv(covariance)  # fault

    @staticmethod
    def mended():
        x = torch.eye(3, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            covariance = x @ x
        return torch.linalg.inv(covariance.float())


class ResizedBytes(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device="cuda")
        return F.interpolate(image, scale_factor=2.0, mode="bilinear")  # fault

    @staticmethod
    def mended():
        image = torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device="cuda")
        return F.interpolate(image.float(), scale_factor=2.0, mode="bilinear").to(image.dtype)


class IntegerGraphProduct(Exhibit):
    rule = "KRN-2"

    @staticmethod
    def faulty():
        graph = torch.eye(3, dtype=torch.int64).to_sparse().cuda()
        return torch.sparse.mm(graph, torch.ones(3, 2, dtype=torch.int64, device="cuda"))  # fault

    @staticmethod
    def mended():
        graph = torch.eye(3).to_sparse().cuda()
        return torch.sparse.mm(graph, torch.ones(3, 2, device="cuda"))


@torch.library.custom_op("museum::halved_on_host", mutates_args=(), device_types="cpu")
def _halved_on_host(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.library.custom_op("museum::halved", mutates_args=())
def _halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class OperatorWrittenForHost(Exhibit):
    rule = "KRN-1"
    error = NotImplementedError

    @staticmethod
    def faulty():
        return _halved_on_host(torch.ones(3, device="cuda"))  # fault

    @staticmethod
    def mended():
        return _halved(torch.ones(3, device="cuda")), _halved_on_host(torch.ones(3))


class BfloatSpectrogram(Exhibit):
    rule = "KRN-4"
    ends = True

    @staticmethod
    def faulty():
        sound = torch.rand(64, device="cuda").bfloat16()
        window = torch.hann_window(16, device="cuda").bfloat16()
        return torch.stft(sound, 16, window=window, return_complex=True)  # fault

    @staticmethod
    def mended():
        sound = torch.rand(64, device="cuda").bfloat16()
        window = torch.hann_window(16, device="cuda")
        return torch.stft(sound.float(), 16, window=window, return_complex=True)


class ScalerOverHalfParameters(Exhibit):
    rule = "AMP-2"
    error = ValueError
    ends = True

    @staticmethod
    def _step(model, dtype):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(1, 2, device="cuda", dtype=dtype)).float().sum()
        scaler.scale(loss).backward()
        return scaler, optimizer

    @staticmethod
    def faulty():
        scaler, optimizer = ScalerOverHalfParameters._step(nn.Linear(2, 2).cuda().half(), torch.float16)
        scaler.step(optimizer)  # fault

    @staticmethod
    def mended():
        scaler, optimizer = ScalerOverHalfParameters._step(nn.Linear(2, 2).cuda(), torch.float32)
        scaler.step(optimizer)
