"""Small labelled pictures as 32 × 32 RGB: Fashion-MNIST or CIFAR-10 from their official files, or handwritten digits.

Read are, in this order, `fashion-mnist` (the four IDX files, plain or gzip) and `cifar-10-batches-bin` (the binary
version; the one in Python's pickle format is not opened) under the given folder or the cache, and otherwise the digits
that scikit-learn brings, where it is installed.

The official test part stays the test part. What else there is, is ordered by its content's digest: the first tenth
validates (of digits, which have no official split, the first tenth tests and the next validates). A picture that
recurs in a later part is left out of the earlier ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from auto_research.data import rows
from auto_research.runtime.cache import cache_folder
from auto_research.runtime.errors import UserError

Images = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Part = Literal["train", "validation", "test"]

SIDE = 32
FASHION, CIFAR, DIGITS = "fashion-mnist", "cifar-10", "digits"
FOLDERS = {FASHION: "fashion-mnist", CIFAR: "cifar-10-batches-bin"}
CLASSES = {
    FASHION: ("tshirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    CIFAR: ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    DIGITS: ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
}
"""One word for each label, in the order of the labels."""
HELD_OUT = 0.1


@dataclass(frozen=True)
class Labelled:
    """Pictures (N, 3, 32, 32) uint8, labels (N,) and the digest of each picture."""

    images: Images
    labels: Ids
    keys: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def first(self, count: int) -> Labelled:
        """The first pictures."""
        return Labelled(self.images[:count], self.labels[:count], self.keys[:count])


@dataclass(frozen=True)
class Pictures:
    """A data set in three parts that share no picture."""

    name: str
    parts: dict[Part, Labelled]

    @property
    def classes(self) -> tuple[str, ...]:
        return CLASSES[self.name]


def read_pictures(dataset_dir: Path | None = None) -> Pictures | None:
    """The first data set that is there; None where none is. Raises `UserError` for damaged files."""
    given = [Path(dataset_dir).expanduser()] if dataset_dir else []
    for name, folder in FOLDERS.items():
        for place in (*(root / folder for root in given), cache_folder("data", folder)):
            if place.is_dir():
                return split(name, *(read_fashion(place) if name == FASHION else read_cifar(place)))
    if importlib.util.find_spec("sklearn") is None:
        return None
    return split(DIGITS, *read_digits(), None, None)


def split(name: str, images: Images, labels: Ids, test_images: Images | None, test_labels: Ids | None) -> Pictures:
    """Parts of labelled pictures (N, 3, 32, 32) with an official test part or without one."""
    keys = _keys(images)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    held = max(1, round(HELD_OUT * len(order)))
    chosen = [order[:held], order[held:]] if test_images is not None else [order[held : 2 * held], order[2 * held :]]
    found: dict[Part, Labelled] = {}
    if test_images is not None and test_labels is not None:
        found["test"] = Labelled(test_images, test_labels, _keys(test_images))
    else:
        found["test"] = _take(images, labels, keys, order[:held], set())
    for part, index in zip(("validation", "train"), chosen, strict=True):
        later = {key for other in found.values() for key in other.keys}
        found[part] = _take(images, labels, keys, index, later)  # type: ignore[index]
    return Pictures(name, found)


def _take(images: Images, labels: Ids, keys: list[str], index: list[int], banned: set[str]) -> Labelled:
    kept = list({keys[i]: i for i in index if keys[i] not in banned}.values())
    return Labelled(images[kept], labels[kept], [keys[i] for i in kept])


def _keys(images: Images) -> list[str]:
    return [hashlib.sha256(image.tobytes()).hexdigest()[:16] for image in images]


def read_fashion(folder: Path) -> tuple[Images, Ids, Images, Ids]:
    """Training pictures and labels, test pictures and labels, from the IDX files of Fashion-MNIST."""
    parts: list[tuple[Images, Ids]] = []
    for part in ("train", "t10k"):
        images = _idx(rows.require(folder, f"{part}-images-idx3-ubyte"), 3)
        labels = _labels(_idx(rows.require(folder, f"{part}-labels-idx1-ubyte"), 1), folder)
        if len(images) != len(labels):
            raise UserError(
                f"{folder} holds {len(images)} pictures of {part} and {len(labels)} labels: fetch it again."
            )
        room = [((SIDE - side) // 2, -(-(SIDE - side) // 2)) for side in images.shape[1:]]
        parts.append((_colour(np.pad(images, ((0, 0), *room))), labels))
    return *parts[0], *parts[1]


def read_cifar(folder: Path) -> tuple[Images, Ids, Images, Ids]:
    """Training pictures and labels, test pictures and labels, from the binary version of CIFAR-10."""
    parts: list[tuple[Images, Ids]] = []
    width = 1 + 3 * SIDE * SIDE
    for names in ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]):
        content = b"".join(rows.read_bytes(rows.require(folder, name)) for name in names)
        if len(content) % width:
            raise UserError(f"{folder} is not the binary version of CIFAR-10: its files do not divide into rows.")
        table = np.frombuffer(content, np.uint8).reshape(-1, width)
        parts.append((table[:, 1:].reshape(-1, 3, SIDE, SIDE), _labels(table[:, 0], folder)))
    return *parts[0], *parts[1]


def read_digits() -> tuple[Images, Ids]:
    """The 1,797 digits of scikit-learn, each pixel drawn four by four."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)
    return _colour(images.repeat(4, axis=1).repeat(4, axis=2)), digits.target.astype(np.int64)


def _colour(grey: npt.NDArray[np.uint8]) -> Images:
    """(N, 32, 32) -> (N, 3, 32, 32)."""
    return np.repeat(grey[:, None], 3, axis=1)


def _labels(labels: npt.NDArray[np.uint8], folder: Path) -> Ids:
    if len(labels) and labels.max() > 9:
        raise UserError(f"{folder} holds a label {int(labels.max())}; labels are 0 to 9: fetch it again.")
    return labels.astype(np.int64)


def _idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes: magic number, sizes as big-endian integers, then the values."""
    content = rows.read_bytes(path)
    head = 4 * (1 + dimensions)
    numbers = np.frombuffer(content[:head], ">u4") if len(content) >= head else np.zeros(1, ">u4")
    shape = tuple(int(n) for n in numbers[1:])
    sides = shape[1:]
    if numbers[0] != 0x800 + dimensions or len(content) != head + int(np.prod(shape)) or any(s > SIDE for s in sides):
        raise UserError(f"{path} is no IDX file of {dimensions} dimensions: fetch it again.")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
