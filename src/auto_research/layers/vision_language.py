"""A small vision-language model: patches → encoder → connector → causal decoder that answers in tokens.

The decoder reads [visual tokens; question tokens] and generates the answer. Visual tokens come first, see one another
in both directions (arXiv:2407.07726) and get no place in the text's order: where a patch lies is known from its 2-D
code alone. Without the code the model is therefore exactly blind to the order of the patches, which a causal mask over
them would give away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from auto_research.layers.attention import MultiHeadAttention, causal_mask
from auto_research.layers.losses import sigmoid_pairs
from auto_research.layers.transformer import BlockCache, TransformerEncoder

ConnectorKind = Literal["linear", "mlp", "resampler", "pixel-shuffle", "gated"]
Objective = Literal["next-token", "sigmoid", "masked-view", "sigmoid+masked-view"]
CONNECTORS: tuple[ConnectorKind, ...] = get_args(ConnectorKind)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def position_code(rows: int, columns: int, dim: int) -> Tensor:
    """Fixed 2-D position code (rows · columns, dim): sines and cosines of the row, then of the column.

    Each half holds sin and cos of the coordinate times dim/4 frequencies from 1 down to 1/10,000, as the code of
    arXiv:1706.03762 for one coordinate. Raises ValueError when 4 does not divide `dim`.
    """
    if dim % 4:
        raise ValueError(f"a 2-D code needs a width divisible by 4, got {dim}")
    frequency = 10_000.0 ** (-torch.arange(dim // 4) / (dim // 4))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.flatten()[:, None] * frequency for place in (row, column)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=-1)


def cut_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, H, W) -> their patches (B, H/patch · W/patch, C · patch²), row by row."""
    batch, channels, height, width = images.shape
    grid = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


class PatchEncoder(nn.Module):
    """Patches, their 2-D code and a bidirectional Transformer.

    Args:
        side: height and width of the images.
        positions: whether patches get their code; without, the encoder commutes with permutations of them.
        mean, deviation: of the training pixels; inputs are standardised by them.
    """

    code: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int,
        *,
        side: int = 32,
        patch: int = 8,
        positions: bool = True,
        mean: float = 0.0,
        deviation: float = 1.0,
    ) -> None:
        super().__init__()
        self.patch, self.grid = patch, side // patch
        self.mean, self.deviation = mean, deviation
        self.project = nn.Linear(3 * patch * patch, dim)
        self.hidden_patch = nn.Parameter(torch.zeros(dim))
        self.stack = TransformerEncoder(dim, heads, 4 * dim, layers)
        code = position_code(self.grid, self.grid, dim)
        self.register_buffer("code", code if positions else torch.zeros_like(code), persistent=False)

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Images (B, 3, side, side) in [0, 1] -> (B, N, dim); patches where `hidden` (B, N) is True are not seen."""
        x = self.project((cut_patches(images, self.patch) - self.mean) / self.deviation)
        if hidden is not None:
            x = torch.where(hidden[..., None], self.hidden_patch.to(x.dtype), x)
        return self.stack(x + self.code.to(x.dtype))


class Linear(nn.Module):
    """One matrix a patch: 16 patches, 16 visual tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, patches: Tensor, code: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim); `code` (N, dim) is not used."""
        return self.project(patches)


class MLP(nn.Module):
    """Two layers with GELU a patch, the connector of LLaVA-1.5 (arXiv:2310.03744)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, patches: Tensor, code: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim); `code` is not used."""
        return self.fall(F.gelu(self.rise(patches)))


class Resampler(nn.Module):
    """A few learned queries that attend to position-coded patches, as in BLIP-2 (arXiv:2301.12597).

    One cross-attention instead of the Q-Former's twelve layers; the number of visual tokens is that of the queries.
    """

    def __init__(self, dim: int, heads: int, queries: int = 4) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim))
        self.norm = nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(dim, heads)

    def forward(self, patches: Tensor, code: Tensor) -> Tensor:
        """Patches (B, N, dim) with their code (N, dim) -> (B, queries, dim)."""
        queries = self.queries.to(patches.dtype).expand(len(patches), -1, -1)
        return queries + self.attention(queries, self.norm(patches) + code.to(patches.dtype))


class PixelShuffle(nn.Module):
    """Folds r × r neighbouring patches into the channels of one token, as in SmolVLM (arXiv:2504.05299).

    A grid of 4 × 4 gives 4 visual tokens at r = 2.
    """

    def __init__(self, dim: int, grid: int, ratio: int = 2) -> None:
        super().__init__()
        if grid % ratio:
            raise ValueError(f"a fold of {ratio} does not divide a grid of {grid}")
        self.grid, self.ratio = grid, ratio
        self.project = nn.Linear(ratio * ratio * dim, dim)

    def fold(self, patches: Tensor) -> Tensor:
        """(B, grid², dim) -> (B, (grid/r)², r² · dim)."""
        batch, _, dim = patches.shape
        side, ratio = self.grid // self.ratio, self.ratio
        blocks = patches.reshape(batch, side, ratio, side, ratio, dim).transpose(2, 3)
        return blocks.reshape(batch, side * side, ratio * ratio * dim)

    def forward(self, patches: Tensor, code: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N/r², dim); `code` is not used."""
        return self.project(self.fold(patches))


class Gated(nn.Module):
    """x + tanh(γ) · MLP(x) with γ from 0, the gate of Flamingo (arXiv:2204.14198): at first the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = MLP(dim)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, patches: Tensor, code: Tensor) -> Tensor:
        """(B, N, dim) -> (B, N, dim); `code` is not used."""
        return patches + self.gate.tanh() * self.mlp(patches, code)


def make_connector(kind: ConnectorKind, dim: int, heads: int, grid: int) -> nn.Module:
    """The connector of this name. Raises ValueError for an unknown one."""
    if kind == "linear":
        return Linear(dim)
    if kind == "mlp":
        return MLP(dim)
    if kind == "resampler":
        return Resampler(dim, heads)
    if kind == "pixel-shuffle":
        return PixelShuffle(dim, grid)
    if kind == "gated":
        return Gated(dim)
    raise ValueError(f"connector '{kind}' is none of {', '.join(CONNECTORS)}")


class ImageTextContrast(nn.Module):
    """Scores of image-text pairs for the sigmoid loss of SigLIP (arXiv:2303.15343, kept in SigLIP 2).

    τ · cosine + b, with τ = e^t from 10 and b from -10: nearly all pairs of a batch are negative at first.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, visual: Tensor, text: Tensor) -> Tensor:
        """Visual tokens (B, V, dim), averaged, against text summaries (M, dim): scores (B, M)."""
        image = F.normalize(self.image(visual.mean(1)), dim=-1)
        return self.log_scale.exp() * image @ F.normalize(self.text(text), dim=-1).T + self.bias


@dataclass(frozen=True)
class VisionLanguageConfig:
    """Sizes and parts of the model.

    Attributes:
        vocabulary: number of tokens; 0 is padding and 1 ends an answer.
        text: longest text, question and answer together.
        layers: of the decoder; the encoder has `encoder_layers`.
        contrast: whether there are the two projections, scale and bias of the image-text loss.
        mean, deviation: of the training pixels.
    """

    vocabulary: int
    text: int
    dim: int = 64
    heads: int = 4
    layers: int = 2
    encoder_layers: int = 1
    connector: ConnectorKind = "linear"
    positions: bool = True
    contrast: bool = False
    side: int = 32
    patch: int = 8
    mean: float = 0.0
    deviation: float = 1.0


PAD, END = 0, 1


class VisionLanguageModel(nn.Module):
    """Patch encoder, connector and decoder; input and output embeddings are tied."""

    def __init__(self, config: VisionLanguageConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.encoder = PatchEncoder(
            dim,
            config.heads,
            config.encoder_layers,
            side=config.side,
            patch=config.patch,
            positions=config.positions,
            mean=config.mean,
            deviation=config.deviation,
        )
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.places = nn.Embedding(config.text, dim)
        # Matrices keep PyTorch's draw: at this width N(0, 0.02²) learns nothing in a short run.
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.decoder = TransformerEncoder(dim, config.heads, 4 * dim, config.layers)
        # Last, so that models which differ only here are drawn alike elsewhere.
        self.connector = make_connector(config.connector, dim, config.heads, self.encoder.grid)
        self.contrast = ImageTextContrast(dim) if config.contrast else None

    def see(self, patches: Tensor) -> Tensor:
        """Visual tokens (B, V, dim) of encoded patches (B, N, dim)."""
        return self.connector(patches, self.encoder.code)

    def read(self, text: Tensor, start: int = 0) -> Tensor:
        """Embedded tokens (B, T) that stand at `start` and after, (B, T, dim)."""
        place = torch.arange(start, start + text.shape[1], device=text.device)
        return self.tokens(text) + self.places(place)

    def look(self, visual: Tensor, rows: int) -> list[BlockCache]:
        """The decoder's keys and values of visual tokens (B, V, dim), for `rows` texts, rows / B adjacent ones each.

        They do not depend on the texts, so a picture is read once however many questions it is asked.
        """
        cache = self.decoder.new_cache()
        self.decoder(visual, cache=cache, latest=1)
        for entry in cache:
            entry.own.repeat(rows // len(visual))
        return cache

    def forward(self, visual: Tensor, text: Tensor, latest: int | None = None) -> Tensor:
        """Logits (R, T, vocabulary) of the token after each of `text` (R, T), or after the `latest` last ones.

        `visual` (B, V, dim) comes from `see`; R is a multiple of B, the texts of a picture adjacent. Padding in the
        text is never looked at.
        """
        prefix, length = visual.shape[1], text.shape[1]
        hidden = self.decoder(
            self.read(text),
            _seen(prefix, text),
            mask=causal_mask(length, prefix + length, text.device),
            cache=self.look(visual, len(text)),
            latest=latest or length,
        )
        return hidden @ self.tokens.weight.T

    def summary(self, text: Tensor) -> Tensor:
        """What the decoder makes of a text (B, T) without an image: its last hidden state (B, dim)."""
        mask = causal_mask(text.shape[1], text.shape[1], text.device)
        return self.decoder(self.read(text), text != PAD, mask=mask, latest=1)[:, 0]

    @torch.no_grad()
    def generate(self, visual: Tensor, question: Tensor, length: int) -> Tensor:
        """The greedy answer (R, length) to questions (R, Q): tokens up to END, then PAD. Shapes as in `forward`."""
        prefix, asked = visual.shape[1], question.shape[1]
        cache, seen = self.look(visual, len(question)), _seen(prefix, question)
        x, mask = self.read(question), causal_mask(asked, prefix + asked, question.device)
        going = torch.ones(len(question), dtype=torch.bool, device=question.device)
        answer: list[Tensor] = []
        for step in range(length):
            hidden = self.decoder(x, seen, mask=mask, cache=cache, latest=1)[:, 0]
            token = (hidden @ self.tokens.weight.T).argmax(-1).masked_fill(~going, PAD)
            answer.append(token)
            going = going & (token != END)
            if step + 1 < length:
                seen = F.pad(seen, (0, 1), value=True)
                x, mask = self.read(token[:, None], asked + step), causal_mask(1, seen.shape[1], seen.device)
        return torch.stack(answer, dim=1)


def answer_loss(model: VisionLanguageModel, visual: Tensor, question: Tensor, answer: Tensor) -> Tensor:
    """Cross-entropy a token of answers (R, A), END included and PAD not, after questions (R, Q)."""
    logits = model(visual, torch.cat([question, answer[:, :-1]], dim=1), latest=answer.shape[1])
    return F.cross_entropy(logits.float().flatten(0, 1), answer.flatten(), ignore_index=PAD)


def contrast_loss(model: VisionLanguageModel, visual: Tensor, caption: Tensor) -> Tensor:
    """Sigmoid loss of images and captions (B, C); a pair is positive when its captions are the same."""
    assert model.contrast is not None, "the model was built without its image-text head"
    same = (caption[:, None] == caption).all(-1)
    return sigmoid_pairs(model.contrast(visual, model.summary(caption)), same)


def masked_view_loss(model: VisionLanguageModel, images: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """1 - cosine between a hidden patch's encoding and what the encoder makes of it in the full view, averaged.

    The masked prediction of SigLIP 2 (arXiv:2502.14786) with the model itself as teacher: the full view `patches`
    (B, N, dim) passes no gradient. `hidden` (B, N) must hide something.
    """
    guessed = model.encoder(images, hidden)
    return (1 - F.cosine_similarity(guessed.float(), patches.detach().float(), dim=-1))[hidden].mean()


def training_loss(
    model: VisionLanguageModel, batch: dict[str, Tensor], objective: Objective, weight: float = 0.0
) -> Tensor:
    """Loss of the answers plus `weight` times the auxiliary losses that the objective names.

    The batch holds images (B, 3, H, W), caption (B, C), hidden (B, N), and K questions a picture: question (B, K, Q)
    and answer (B, K, A).
    """
    patches = model.encoder(batch["images"])
    visual = model.see(patches)
    loss = answer_loss(model, visual, batch["question"].flatten(0, 1), batch["answer"].flatten(0, 1))
    if "sigmoid" in objective:
        loss = loss + weight * contrast_loss(model, visual, batch["caption"])
    if "masked-view" in objective:
        loss = loss + weight * masked_view_loss(model, batch["images"], patches, batch["hidden"])
    return loss


def _seen(prefix: int, text: Tensor) -> Tensor:
    """(B, prefix + T): all of the prefix, and what is no padding."""
    return F.pad(text != PAD, (prefix, 0), value=True)
