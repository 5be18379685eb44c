"""Labelled pictures: official formats written by hand, the split, damage."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from auto_research.data import pictures
from auto_research.data.pictures import CIFAR, DIGITS, FASHION, read_pictures, split
from auto_research.runtime.errors import UserError


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pictures, "cache_folder", lambda *parts: tmp_path.joinpath("cache", *parts))


def fashion(folder: Path, train: np.ndarray, labels: list[int]) -> Path:
    """The four IDX files; the test part is the first three training pictures turned upside down."""
    where = folder / "fashion-mnist"
    where.mkdir()
    for part, images, said in (("train", train, labels), ("t10k", train[:3, ::-1], labels[:3])):
        head = struct.pack(">4I", 0x803, len(images), 28, 28)
        (where / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images.tobytes()))
        (where / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(said)) + bytes(said))
    return where


def drawn(count: int, side: int = 28) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side), dtype=np.uint8)


def test_fashion_mnist_is_read_and_framed(tmp_path):
    images, labels = drawn(20), [i % 10 for i in range(20)]
    fashion(tmp_path, images, labels)
    found = read_pictures(tmp_path)
    assert found.name == FASHION
    assert {name: len(part) for name, part in found.parts.items()} == {"test": 3, "validation": 2, "train": 18}
    test = found.parts["test"]
    assert test.labels.tolist() == labels[:3]
    assert (test.images[:, :, 2:-2, 2:-2] == images[:3, None, ::-1]).all(), "all three channels hold the picture"
    assert test.images[:, :, :2].max() == 0
    assert found.classes[9] == "boot"
    by_key = {image.tobytes(): label for image, label in zip(images, labels)}
    for part in ("train", "validation"):
        for image, label in zip(found.parts[part].images, found.parts[part].labels):
            assert by_key[np.ascontiguousarray(image[0, 2:-2, 2:-2]).tobytes()] == label


def test_cifar_is_read_plane_by_plane(tmp_path):
    where = tmp_path / "cifar-10-batches-bin"
    where.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (12, 3072), dtype=np.uint8)
    table = np.concatenate([np.arange(12, dtype=np.uint8)[:, None] % 10, pixels], axis=1)
    for i in range(5):
        (where / f"data_batch_{i + 1}.bin").write_bytes(table[2 * i : 2 * i + 2].tobytes())
    (where / "test_batch.bin").write_bytes(table[10:].tobytes())
    found = read_pictures(tmp_path)
    assert found.name == CIFAR
    assert found.parts["test"].labels.tolist() == [0, 1]
    assert found.parts["test"].images[0, 1, 0].tolist() == pixels[10, 1024:1056].tolist(), "the green plane's first row"
    assert len(found.parts["train"]) + len(found.parts["validation"]) == 10


def test_digits_are_enlarged_and_split_by_content():
    pytest.importorskip("sklearn")
    found = read_pictures()
    assert found.name == DIGITS
    sizes = {name: len(part) for name, part in found.parts.items()}
    assert sizes == {"test": 180, "validation": 180, "train": 1437}
    image = found.parts["train"].images[0]
    assert (image[:, ::4, ::4].repeat(4, 1).repeat(4, 2) == image).all()
    assert image.max() > 200
    keys = [set(part.keys) for part in found.parts.values()]
    assert len(set.union(*keys)) == sum(map(len, keys)), "no picture is in two parts"


def test_a_picture_stays_in_the_latest_part_that_has_it():
    images = np.repeat(drawn(30, 32)[:, None], 3, axis=1)
    doubled = np.concatenate([images, images[:10]])
    found = split(FASHION, doubled, np.arange(40) % 10, images[:5], np.arange(5))
    keys = {name: part.keys for name, part in found.parts.items()}
    assert len(keys["test"]) == 5
    assert all(len(set(part)) == len(part) for part in keys.values())
    assert len(keys["train"]) + len(keys["validation"]) == 25, "without the test pictures and second copies"


@pytest.mark.parametrize("damage", ["magic", "cut", "labels", "label", "missing", "cifar"])
def test_damage_is_one_sentence(tmp_path, damage):
    if damage == "cifar":
        where = tmp_path / "cifar-10-batches-bin"
        where.mkdir()
        for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
            (where / name).write_bytes(b"12345")
    else:
        where = fashion(tmp_path, drawn(20), [i % 10 for i in range(20)])
        labels = where / "train-labels-idx1-ubyte"
        content = labels.read_bytes()
        if damage == "missing":
            labels.unlink()
        else:
            labels.write_bytes({
                "magic": b"\x00\x00\x08\x03" + content[4:], "cut": content[:-1],
                "labels": struct.pack(">2I", 0x801, 3) + b"\x01\x02\x03", "label": content[:-1] + b"\x0b",
            }[damage])  # fmt: skip
    with pytest.raises(UserError) as error:
        read_pictures(tmp_path)
    assert str(where) in str(error.value)
    assert "\n" not in str(error.value)
