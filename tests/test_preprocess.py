from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgevit.errors import BundleError, DataError
from edgevit.preprocess import Preprocess


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(
        0, 256, (height, width, 3), np.uint8
    )


def box_average(frame: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The exact mean of every ``rows`` x ``columns`` block."""
    height, width = frame.shape[0] // rows, frame.shape[1] // columns
    return frame.astype(np.float64).reshape(height, rows, width, columns, 3).mean((1, 3))


@pytest.mark.parametrize("ratio", [2, 3, 4, 7])
def test_shrinking_averages_over_boxes(ratio: int) -> None:
    frame = noise(16 * ratio, 16 * ratio)
    found = Preprocess(size=16)(frame)
    wanted = box_average(frame, ratio, ratio)[:, :, ::-1]
    assert np.abs(found - wanted).max() <= 0.5 + 1e-9


def test_squash_averages_each_axis_by_its_own_ratio() -> None:
    frame = noise(2 * 16, 5 * 16)
    found = Preprocess(size=16, crop="squash")(frame)
    assert np.abs(found - box_average(frame, 2, 5)[:, :, ::-1]).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("height", [1, 8, 16])
def test_squash_does_not_alias_the_axis_that_shrinks(height: int) -> None:
    """Of ten columns the middle two are white: the mean is a fifth, however few rows there are."""
    frame = np.zeros((height, 160, 3), np.uint8)
    frame[:, 4::10] = frame[:, 5::10] = 255
    found = Preprocess(size=16, crop="squash")(frame)
    assert np.abs(found - 255 / 5).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(48, 80), (80, 48), (48, 49), (51, 48)])
def test_the_middle_square_is_kept(height: int, width: int) -> None:
    """Everything outside the middle 48 x 48 is white and must not show."""
    frame = np.full((height, width, 3), 255, np.uint8)
    top, left = (height - 48) // 2, (width - 48) // 2
    inside = noise(48, 48) // 2
    frame[top : top + 48, left : left + 48] = inside
    found = Preprocess(size=24)(frame)
    assert np.abs(found - box_average(inside, 2, 2)[:, :, ::-1]).max() <= 0.5 + 1e-9


def test_the_output_is_rgb() -> None:
    blue_green_red = np.tile(np.array([10, 20, 30], np.uint8), (40, 50, 1))
    for size in (20, 40, 60):
        found = Preprocess(size=size)(blue_green_red)
        assert (found == [30, 20, 10]).all()


def test_a_frame_of_the_right_size_is_only_reordered() -> None:
    frame = noise(32, 32)
    np.testing.assert_array_equal(Preprocess(size=32)(frame), frame[:, :, ::-1])


def test_the_frame_is_left_as_it_was() -> None:
    for height, width in ((32, 32), (50, 70), (5, 4)):
        frame = noise(height, width)
        before = frame.copy()
        Preprocess(size=32)(frame)
        np.testing.assert_array_equal(frame, before)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 40),
    st.sampled_from(["center", "squash"]),
)
def test_any_size_works_and_stays_between_the_extremes(
    height: int, width: int, size: int, crop: str
) -> None:
    frame = noise(height, width)
    found = Preprocess(size=size, crop=crop)(frame)
    assert found.shape == (size, size, 3)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert (found >= frame.min((0, 1))[::-1]).all()
    assert (found <= frame.max((0, 1))[::-1]).all()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 40_000), (40_000, 1)])
def test_extreme_shapes(height: int, width: int) -> None:
    frame = np.full((height, width, 3), 77, np.uint8)
    for crop in ("center", "squash"):
        assert (Preprocess(size=24, crop=crop)(frame) == 77).all()


def test_views_give_the_same_pixels_as_copies() -> None:
    """Cameras hand out flipped and cut views."""
    frame = noise(60, 80)
    for view in (frame[:, ::-1], frame[::2, 5:55], frame.transpose(1, 0, 2)):
        np.testing.assert_array_equal(
            Preprocess(size=24)(view), Preprocess(size=24)(np.ascontiguousarray(view))
        )


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 1), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 0, 3), np.uint8),
    ],
)
def test_what_is_no_frame_is_refused(frame: np.ndarray) -> None:
    with pytest.raises(DataError, match="a frame must"):
        Preprocess(size=8)(frame)


SPEC = Preprocess(size=32)
CHANGES: dict[str, Any] = {
    "size": 33,
    "crop": "squash",
    "mean": (0.485, 0.456, 0.407),
    "std": (0.229, 0.224, 0.226),
}


def test_the_hash_covers_every_field() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Preprocess)}
    hashes = {dataclasses.replace(SPEC, **{name: value}).hash for name, value in CHANGES.items()}
    assert len(hashes | {SPEC.hash}) == len(CHANGES) + 1
    assert Preprocess(size=32).hash == SPEC.hash


@given(
    st.integers(1, 4096),
    st.sampled_from(["center", "squash"]),
    st.tuples(*[st.floats(0, 1)] * 3),
    st.tuples(*[st.floats(0.01, 10)] * 3),
)
def test_it_survives_json(
    size: int, crop: str, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> None:
    spec = Preprocess(size, crop, mean, std)
    found = Preprocess.from_json(json.loads(json.dumps(spec.to_json())))
    assert found == spec
    assert found.hash == spec.hash


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_a_changed_field_does_not_match_the_hash(field: str) -> None:
    with pytest.raises(BundleError, match="another preprocessing"):
        Preprocess.from_json({**SPEC.to_json(), field: CHANGES[field]})


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": -1},
        {"size": 4097},
        {"size": True},
        {"size": 32.0},
        {"size": "32"},
        {"crop": "middle"},
        {"crop": ["center"]},
        {"mean": None},
        {"mean": [0.5, 0.5]},
        {"mean": "123"},
        {"mean": [0.5, 0.5, "x"]},
        {"std": [0.5, 0.5, float("nan")]},
        {"std": [0.5, 0.5, 10**400]},
    ],
)
def test_what_is_no_specification_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="not a preprocessing specification"):
        Preprocess.from_json({**SPEC.to_json(), **change})


@pytest.mark.parametrize("value", [None, [], "spec", 3, {}])
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(BundleError, match="not a preprocessing specification"):
        Preprocess.from_json(value)
