"""Semantic ids: an item's name as a short sequence of codes, its vocabulary, and the trie of all valid names.

Codes (I, m) become an id table by `collision_tokens` (items that share all learned codes are numbered), a `Vocabulary`
gives every level its own range of token ids, and a `Trie` over those tokens says which token may follow which prefix.

Letters: I items, m tokens an id, L = m - 1 learned levels when the last token tells collisions apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from auto_research.layers.quantise import code_usage
from auto_research.runtime.errors import UserError

PAD, BOS = 0, 1
FIRST_CODE = 2


def collision_tokens(codes: Tensor) -> Tensor:
    """Number of each item within the group that shares its codes: (I, L) -> (I,), 0, 1, 2, ... in item order."""
    group = torch.unique(codes, dim=0, return_inverse=True)[1]
    order = torch.argsort(group, stable=True)
    size = torch.bincount(group)
    start = size.cumsum(0) - size
    number = torch.empty_like(group)
    number[order] = torch.arange(len(group), device=codes.device) - start[group[order]]
    return number


@dataclass(frozen=True)
class SemanticIds:
    """The id of every item.

    Attributes:
        codes: (I, m) int64 on the CPU; column l lies in 0..sizes[l]-1.
        sizes: number of codes of each position, which fixes the vocabulary.
        numbered: whether the last column is a collision number rather than a learned code.
    """

    codes: Tensor
    sizes: tuple[int, ...]
    numbered: bool

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.shape[1] != len(self.sizes):
            raise ValueError(f"codes of shape {tuple(self.codes.shape)} need {len(self.sizes)} columns")
        highest = torch.tensor(self.sizes)
        if len(self.codes) and (bool((self.codes < 0).any()) or bool((self.codes.amax(0) >= highest).any())):
            raise ValueError(f"a code lies outside its level's range {self.sizes}")
        if self.numbered and self.distinct != len(self.codes):
            raise ValueError("two items share an id although collisions are numbered")

    @classmethod
    def number(cls, codes: Tensor, size: int, capacity: int | None = None) -> Self:
        """Adds the collision token to learned codes (I, L) of `size` codes a level.

        `capacity` is the range of that token, by default the largest group; a larger one lets several id tables share
        one vocabulary.
        """
        codes = codes.cpu()
        number = collision_tokens(codes)
        largest = int(number.max()) + 1
        capacity = largest if capacity is None else capacity
        if capacity < largest:
            raise ValueError(f"{largest} items share their codes, which a capacity of {capacity} cannot number")
        return cls(torch.cat([codes, number[:, None]], dim=1), (*[size] * codes.shape[1], capacity), True)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def length(self) -> int:
        """Tokens an id, m."""
        return len(self.sizes)

    @property
    def levels(self) -> int:
        """Learned levels L."""
        return self.length - self.numbered

    @property
    def distinct(self) -> int:
        """Number of different ids."""
        return len(torch.unique(self.codes, dim=0))

    @cached_property
    def capacity(self) -> int:
        """Codes the last position really uses when it numbers collisions: the largest group of equal prefixes."""
        return int(torch.unique(self.codes[:, : self.levels], dim=0, return_counts=True)[1].max())

    def widened(self, capacity: int) -> Self:
        """The same ids in a vocabulary whose collision token has `capacity` values."""
        return type(self)(self.codes, (*self.sizes[: self.levels], capacity), self.numbered)

    def unnumbered(self) -> Self:
        """Learned codes only: items with equal codes share an id."""
        return type(self)(self.codes[:, : self.levels], self.sizes[: self.levels], False)

    def shuffled(self, generator: torch.Generator | None = None) -> Self:
        """The same multiset of ids, dealt to the items at random: what is lost is the link to content alone."""
        order = torch.randperm(len(self), generator=generator)
        return type(self)(self.codes[order], self.sizes, self.numbered)

    def report(self) -> dict[str, float]:
        """Prefix uniqueness, largest collision group, and usage and entropy (bits) of each learned level."""
        prefixes, sharing = torch.unique(self.codes[:, : self.levels], dim=0, return_counts=True)
        numbers = {
            "prefix_uniqueness": len(prefixes) / len(self),
            "items_with_unique_prefix": float((sharing == 1).sum()) / len(self),
            "largest_collision_group": float(sharing.max()),
        }
        for level in range(self.levels):
            usage = code_usage(self.codes[:, level], self.sizes[level])
            numbers[f"code_usage_level_{level}"] = usage.used
            numbers[f"code_entropy_level_{level}"] = usage.entropy
        return numbers

    def save(self, path: Path) -> None:
        """Writes the table as a safetensors file."""
        from safetensors.torch import save_file

        sizes = torch.tensor(self.sizes)
        save_file({"codes": self.codes.contiguous(), "sizes": sizes, "numbered": torch.tensor([self.numbered])}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote. Raises `UserError` for a file that is no valid id table."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            stored = load_file(path)
            return cls(stored["codes"], tuple(stored["sizes"].tolist()), bool(stored["numbered"].item()))
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is no table of semantic ids ({error}); build it again") from error


@dataclass(frozen=True)
class Vocabulary:
    """Token ids: PAD 0, BOS 1, one disjoint range a position of the id, then a block of hashed users.

    Attributes:
        sizes: number of codes of each position.
        users: number of user tokens; a user takes token `user mod users`. 0 leaves them out.
    """

    sizes: tuple[int, ...]
    users: int = 0

    @property
    def starts(self) -> list[int]:
        """First token of each position's range."""
        starts = [FIRST_CODE]
        for size in self.sizes[:-1]:
            starts.append(starts[-1] + size)
        return starts

    @property
    def first_user(self) -> int:
        """First user token."""
        return FIRST_CODE + sum(self.sizes)

    def __len__(self) -> int:
        return self.first_user + self.users

    def tokens(self, codes: Tensor) -> Tensor:
        """Codes (..., m') of the first m' positions -> token ids of the same shape."""
        return codes + torch.tensor(self.starts[: codes.shape[-1]], device=codes.device)

    def user_tokens(self, user: Tensor) -> Tensor:
        """User numbers -> token ids of the same shape."""
        return self.first_user + user % self.users


class Trie(nn.Module):
    """All valid token sequences of one length, as compressed sparse rows of tensors.

    The nodes of a depth are the distinct prefixes of that length in lexicographic order, so the children of a node are
    consecutive nodes of the next depth. A full sequence (a leaf) holds one item, or several in the order of
    `priority`. The tables are buffers that follow the device and are not saved: they are made from the ids.

    Args:
        tokens: (I, m) the sequence of each item.
        priority: (I,) order of items that share a sequence, highest first; ties and None: by item index.
    """

    def __init__(self, tokens: Tensor, priority: Tensor | None = None) -> None:
        super().__init__()
        count, length = tokens.shape
        order = torch.arange(count, device=tokens.device)
        if priority is not None:
            order = torch.argsort(priority, descending=True, stable=True)
        for column in range(length - 1, -1, -1):  # least significant key first
            order = order[torch.argsort(tokens[order, column], stable=True)]
        ordered = tokens[order]
        self.length = length
        self.branching: list[int] = []
        # changed[:, l]: the prefix of l + 1 tokens differs from that of the row before it.
        changed = torch.ones_like(ordered, dtype=torch.bool)
        changed[1:] = (ordered[1:] != ordered[:-1]).cumsum(1) > 0
        starts = [torch.zeros(1, dtype=torch.long, device=tokens.device)]
        starts += [changed[:, level].nonzero().flatten() for level in range(length)]
        end = torch.tensor([count], device=tokens.device)
        for level in range(length):
            child_start = starts[level + 1]
            first = torch.searchsorted(child_start, torch.cat([starts[level], end]))
            self._keep(f"first_{level}", first)
            self._keep(f"token_{level}", ordered[child_start, level])
            self.branching.append(int(first.diff().max()))
        self._keep("leaf_first", torch.cat([starts[length], end]))
        self._keep("leaf_items", order)

    def _keep(self, name: str, table: Tensor) -> None:
        self.register_buffer(name, table.contiguous(), persistent=False)

    def __len__(self) -> int:
        return int(self.leaf_first.shape[0]) - 1

    def following(self, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """What may follow `nodes` (...) of a depth: (child nodes, their tokens, real), each (..., W).

        W is the largest number of children at that depth; entries where `real` is False are fillers. A node of -1 has
        no children.
        """
        first: Tensor = getattr(self, f"first_{depth}")
        token: Tensor = getattr(self, f"token_{depth}")
        inside = nodes.clamp_min(0)
        child = first[inside][..., None] + torch.arange(self.branching[depth], device=nodes.device)
        real = (child < first[inside + 1][..., None]) & (nodes >= 0)[..., None]
        child = child.clamp_max(len(token) - 1)
        return child, token[child], real

    def find(self, tokens: Tensor) -> Tensor:
        """Node reached by prefixes (..., l), l in 1..m; -1 where no item begins like that."""
        nodes = torch.zeros(tokens.shape[:-1], dtype=torch.long, device=tokens.device)
        for depth in range(tokens.shape[-1]):
            child, token, real = self.following(nodes, depth)
            match = real & (token == tokens[..., depth, None])
            nodes = torch.where(match.any(-1), child.gather(-1, match.int().argmax(-1, keepdim=True))[..., 0], -1)
        return nodes

    def items(self, leaves: Tensor, top: int) -> Tensor:
        """Items of leaves (B, N), -1 for none, in order, leaf by leaf: (B, top) item indices, -1 as filler."""
        inside = leaves.clamp_min(0)
        count = (self.leaf_first[inside + 1] - self.leaf_first[inside]).masked_fill(leaves < 0, 0)
        row, source, within = expand(count, top)
        filled = source >= 0
        leaf = inside[row, source.clamp_min(0)]
        item = self.leaf_items[(self.leaf_first[leaf] + within).clamp_max(len(self.leaf_items) - 1)]
        return item.masked_fill(~filled, -1)


def expand(count: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of a list in which entry n of a row takes `count[b, n]` consecutive places.

    count (B, N) -> (row (B, 1), source (B, top), within (B, top)): slot j of row b belongs to entry `source[b, j]` (-1
    past the end) as its `within[b, j]`-th place.
    """
    end = count.cumsum(1)
    slot = torch.arange(top, device=count.device).expand(len(count), top).contiguous()
    source = torch.searchsorted(end, slot, right=True)
    past = source >= count.shape[1]
    source = source.clamp_max(count.shape[1] - 1)
    within = slot - (end - count).gather(1, source)
    row = torch.arange(len(count), device=count.device)[:, None]
    return row, source.masked_fill(past, -1), within.masked_fill(past, 0)
