"""Generated shapes: what is drawn, how parts are divided, and what trivial predictors can score."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_research.data import shapes

PARTS = ("train", "validation", "test")


def supersampled(colour, shape, x, y, half):
    """Second method: share of 40 x 40 points of each pixel that lie inside the shape."""
    fine = (np.arange(shapes.SIDE * 40) + 0.5) / 40
    dx, dy = np.abs(fine[None, :] - x), np.abs(fine[:, None] - y)
    if shape == 0:
        inside = (dx < half) & (dy < half)
    else:
        inside = ((dx < half) & (dy < half / 3)) | ((dx < half / 3) & (dy < half))
    share = inside.reshape(shapes.SIDE, 40, shapes.SIDE, 40).mean((1, 3))
    image = np.full((3, shapes.SIDE, shapes.SIDE), 0.1)
    image[colour] += 0.8 * share
    return image


@pytest.mark.parametrize(
    ("attributes", "geometry"),
    [((0, 0, 0), (8.0, 7.5, 3.0)), ((1, 1, 1), (25.3, 6.2, 4.5)), ((2, 1, 2), (6.0, 26.0, 3.0))],
)
def test_rendering_equals_supersampling(attributes, geometry):
    image = shapes.render(np.array([attributes]), np.array([geometry]))[0]
    # A cross is the union of bars by maximum, which is exact except at the four inner corners.
    assert np.abs(image - supersampled(*attributes[:2], *geometry)).max() < (0.03 if attributes[1] == 0 else 0.25)
    assert np.abs(image - supersampled(*attributes[:2], *geometry)).mean() < 2e-3


@pytest.mark.parametrize("part", PARTS)
def test_pictures_show_what_their_attributes_say(part):
    made = shapes.scenes(part, 240)
    assert made.images.shape == (240, 3, 32, 32)
    assert made.images.dtype == np.uint8
    signal = made.images.astype(float) - 0.1 * 255
    assert (signal.clip(min=12).sum((2, 3)).argmax(1) == made.attributes[:, 0]).all()
    body = signal.max(1) > 60
    middle = [(body * axis).sum((1, 2)) / body.sum((1, 2)) for axis in (np.arange(32), np.arange(32)[:, None])]
    right, down = (place > 15.5 for place in middle)
    assert (2 * down + right == made.attributes[:, 2]).all()
    for own, quarter in zip(body, made.attributes[:, 2]):  # nothing crosses into another quarter
        down, right = 16 * (quarter // 2), 16 * (quarter % 2)
        assert own[down : down + 16, right : right + 16].sum() == own.sum()
    half = shapes.layouts(part, 240)[1][:, 2] / 10
    area = np.take_along_axis(signal.sum((2, 3)), made.attributes[:, :1], 1)[:, 0] / (0.8 * 255)
    share = area / (2 * half) ** 2  # of the box: all of it, or two bars a third as wide that overlap in a ninth
    assert np.abs(share - np.where(made.attributes[:, 1] == 0, 1, 2 / 3 - 1 / 9)).max() < 0.1


def test_noise_has_the_declared_deviation():
    made = shapes.scenes("test", 48)
    attributes, geometry = shapes.layouts("test", 48)
    noise = made.images / 255 - shapes.render(attributes, geometry / 10)
    assert noise.std() == pytest.approx(shapes.NOISE, rel=0.03)
    assert abs(noise.mean()) < 2e-4


def test_parts_are_deterministic_distinct_and_disjoint():
    keys = {part: shapes.keys(part, 3000) for part in PARTS}
    assert all(len(set(found)) == 3000 for found in keys.values())
    assert not set(keys["train"]) & set(keys["validation"])
    assert not set(keys["train"]) & set(keys["test"])
    assert not set(keys["validation"]) & set(keys["test"])
    first, again = shapes.scenes("validation", 60), shapes.scenes("validation", 60)
    assert np.array_equal(first.images, again.images)
    assert first.keys == again.keys == keys["validation"][:60]


@settings(max_examples=20)
@given(st.sampled_from(PARTS), st.integers(1, 500))
def test_combinations_are_even_and_unaffected_by_the_count(part, count):
    attributes, geometry = shapes.layouts(part, count)
    more, further = shapes.layouts(part, count + 17)
    assert np.array_equal(attributes, more[:count])
    assert np.array_equal(geometry, further[:count])
    _, seen = np.unique(attributes @ [8, 4, 1], return_counts=True)
    assert seen.max() - seen.min() <= 1
    assert len(seen) == min(count, 20 if part == "train" else 24)


def test_training_never_shows_the_untrained_combinations():
    train, validation = shapes.scenes("train", 400), shapes.scenes("validation", 240)
    assert not train.untrained.any()
    assert validation.untrained.mean() == pytest.approx(4 / 24)
    shown = {tuple(row) for row in train.attributes.tolist()}
    assert shown | set(shapes.UNTRAINED) == set(shapes.COMBINATIONS)
    assert np.bincount(train.attributes[:, 1]).tolist() == [200, 200]
    assert np.bincount(train.attributes[:, 2]).tolist() == [100] * 4


def test_answers_are_those_of_the_question():
    made = shapes.scenes("validation", 48)
    for row, attributes in zip(made.answers, made.attributes):
        words = [shapes.ANSWERS[answer] for answer in row]
        assert words == [choices[a] for choices, a in zip(shapes.CHOICES, attributes)]


def test_refuses_more_pictures_than_layouts():
    with pytest.raises(ValueError, match="can hold"):
        shapes.layouts("train", 10_000_000)
    with pytest.raises(ValueError, match="not 0"):
        shapes.layouts("test", 0)


def test_blank_holds_no_object():
    assert shapes.blank().shape == (3, 32, 32)
    assert len(np.unique(shapes.blank())) == 1
