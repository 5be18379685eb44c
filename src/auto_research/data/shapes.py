"""Visual shapes: generated pictures of one square or cross, three questions about each, nine answers.

A picture is 32 × 32 RGB: a square or a cross in red, green or blue, somewhere near the middle of one of the four
quarters, with Gaussian noise. Centres and sizes vary by tenths of a pixel, edges are anti-aliased. Training never
shows the combinations of colour, shape and place in `UNTRAINED`; validation and test show all 24 equally often, so
that there the most frequent answers score (1/3 + 1/2 + 1/4)/3 = 0.361 and a model that cannot see places at most
(1 + 1 + 1/4)/3 = 0.75.

Everything is a pure function of the part's name and the number of pictures; the layouts of two parts never agree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Part = Literal["train", "validation", "test"]
Ids = npt.NDArray[np.int64]

SIDE = 32
COLOURS = ("red", "green", "blue")
SHAPES = ("square", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTIONS = ("what colour ?", "what shape ?", "where is it ?")
TOPICS = ("colour", "shape", "place")
"""What each question is about; also the columns of `Scenes.attributes`."""
CHOICES = (COLOURS, SHAPES, PLACES)
"""Possible answers of each question."""
ANSWERS = COLOURS + SHAPES + PLACES
FIRST_ANSWER = (0, len(COLOURS), len(COLOURS) + len(SHAPES))
"""Index in ANSWERS of the first answer of each question."""

COMBINATIONS = tuple((c, s, p) for c in range(len(COLOURS)) for s in range(len(SHAPES)) for p in range(len(PLACES)))
UNTRAINED = ((0, 0, 0), (1, 1, 1), (2, 0, 2), (0, 1, 3))
"""Colour, shape, place never trained together: one a place and two a shape, so that both stay evenly spread."""

BACKGROUND, FOREGROUND = 0.1, 0.9
NOISE = 0.015
# A layout is a place in this grid, in tenths of a pixel: centre of the quarter -2 .. +2 both ways, half size 3 .. 4.5.
# The farthest edge is 6.5 pixels from the centre of a quarter of 16, so nothing crosses into a neighbour.
SHIFTS = np.arange(-20, 21)
HALF_SIZES = np.arange(30, 46)
LAYOUTS = len(SHIFTS) ** 2 * len(HALF_SIZES)
_PARTS: tuple[Part, ...] = get_args(Part)
_SEED = 20_250_101
_CHUNK = 1024


@dataclass(frozen=True)
class Scenes:
    """Pictures and what is on them.

    Attributes:
        images: (N, 3, 32, 32) uint8.
        attributes: (N, 3) index of colour, shape and place.
        keys: what is on each picture apart from noise, for checks of the split.
    """

    images: npt.NDArray[np.uint8]
    attributes: Ids
    keys: list[str]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def answers(self) -> Ids:
        """(N, 3) index in ANSWERS of the true answer of each question."""
        return self.attributes + np.array(FIRST_ANSWER)

    @property
    def untrained(self) -> npt.NDArray[np.bool_]:
        """(N,) whether this combination of attributes is never trained."""
        return (self.attributes[:, None] == np.array(UNTRAINED)).all(-1).any(-1)


def combinations(part: Part) -> Ids:
    """Colour, shape and place of the combinations that a part shows, (20, 3) for training and (24, 3) otherwise."""
    return np.array([c for c in COMBINATIONS if part != "train" or c not in UNTRAINED])


def layouts(part: Part, count: int) -> tuple[Ids, Ids]:
    """Attributes (N, 3) and geometry (N, 3) of a part: centre x, centre y, half size, in tenths of a pixel.

    Combinations take turns, so that each appears equally often up to one. Each layout is drawn without replacement,
    and every part draws from its own third of the layouts.

    Raises ValueError when there are not that many layouts.
    """
    shown = combinations(part)
    share = len(range(_PARTS.index(part), LAYOUTS, len(_PARTS)))
    if not 0 < count <= share * len(shown):
        raise ValueError(f"{part} can hold 1 to {share * len(shown)} pictures, not {count}")
    attributes = shown[np.arange(count) % len(shown)]
    geometry = np.empty((count, 3), dtype=np.int64)
    for index, (colour, shape, place) in enumerate(shown):
        order = _order(int(colour), int(shape), int(place))[_PARTS.index(part) :: len(_PARTS)]
        mine = slice(index, None, len(shown))
        drawn = order[: len(range(*mine.indices(count)))]
        shift_x, rest = drawn % len(SHIFTS), drawn // len(SHIFTS)
        shift_y, size = rest % len(SHIFTS), rest // len(SHIFTS)
        down, right = divmod(int(place), 2)
        geometry[mine, 0] = SIDE * 10 * (1 + 2 * right) // 4 + SHIFTS[shift_x]
        geometry[mine, 1] = SIDE * 10 * (1 + 2 * down) // 4 + SHIFTS[shift_y]
        geometry[mine, 2] = HALF_SIZES[size]
    return attributes, geometry


@functools.cache
def _order(colour: int, shape: int, place: int) -> Ids:
    return np.random.default_rng([_SEED, colour, shape, place]).permutation(LAYOUTS)


def keys(part: Part, count: int) -> list[str]:
    """What is on each picture of a part apart from noise: words, centre and half size in tenths of a pixel."""
    attributes, geometry = layouts(part, count)
    return [
        f"{COLOURS[c]} {SHAPES[s]} {PLACES[p]} at {x} {y} size {h}"
        for (c, s, p), (x, y, h) in zip(attributes.tolist(), geometry.tolist(), strict=True)
    ]


def scenes(part: Part, count: int) -> Scenes:
    """The pictures of a part."""
    attributes, geometry = layouts(part, count)
    random = np.random.default_rng([_SEED, _PARTS.index(part)])
    images = np.empty((count, 3, SIDE, SIDE), dtype=np.uint8)
    for first in range(0, count, _CHUNK):
        rows = slice(first, first + _CHUNK)
        clean = render(attributes[rows], geometry[rows] / 10)
        noisy = clean + NOISE * random.standard_normal(clean.shape, dtype=np.float32)
        images[rows] = np.clip(noisy * 255, 0, 255).round()
    return Scenes(images, attributes, keys(part, count))


def render(attributes: Ids, geometry: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Noise-free pictures (N, 3, 32, 32) in [0, 1]; geometry (N, 3) is centre x, centre y and half size in pixels.

    Pixel i covers i to i + 1 and is filled in proportion to what the shape covers of it. A cross is the union of two
    bars as long as the square's side and a third as wide.
    """
    x, y, half = geometry.T[:, :, None]
    pixel = np.arange(SIDE)

    def covered(centre: npt.NDArray[Any], reach: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.clip(np.minimum(centre + reach, pixel + 1) - np.maximum(centre - reach, pixel), 0, 1)

    across, down = covered(x, half), covered(y, half)
    thin_across, thin_down = covered(x, half / 3), covered(y, half / 3)
    square = down[:, :, None] * across[:, None]
    upright, lying = down[:, :, None] * thin_across[:, None], thin_down[:, :, None] * across[:, None]
    inside = np.where(attributes[:, 1, None, None] == 0, square, np.maximum(upright, lying))
    images = np.full((len(attributes), 3, SIDE, SIDE), BACKGROUND, dtype=np.float32)
    images[np.arange(len(attributes)), attributes[:, 0]] += (FOREGROUND - BACKGROUND) * inside.astype(np.float32)
    return images


def blank() -> npt.NDArray[np.uint8]:
    """A picture (3, 32, 32) of the background alone."""
    return np.full((3, SIDE, SIDE), round(BACKGROUND * 255), dtype=np.uint8)
