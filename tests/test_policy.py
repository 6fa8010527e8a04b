from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.errors import BundleError
from edgevit.policy import NEVER, ExitPolicy

confidences = st.floats(0, 1)
threshold_lists = st.lists(st.floats(0, 1) | st.just(NEVER), max_size=5)


@given(threshold_lists, st.data())
def test_a_frame_leaves_at_the_first_exit_that_is_sure_enough(
    thresholds: list[float], data: st.DataObject
) -> None:
    policy = ExitPolicy(tuple(thresholds))
    sure = data.draw(
        st.lists(confidences, min_size=len(thresholds) + 1, max_size=len(thresholds) + 1)
    )
    left = next(stage for stage, value in enumerate(sure) if policy.leaves_at(stage, value))
    reached = [stage for stage, limit in enumerate(thresholds) if sure[stage] >= limit]
    assert left == min([*reached, len(thresholds)])


@given(st.floats(0, 1))
def test_never_is_never_reached(confidence: float) -> None:
    assert not ExitPolicy((NEVER,)).leaves_at(0, confidence)


def test_the_threshold_itself_is_sure_enough() -> None:
    assert ExitPolicy((0.75,)).leaves_at(0, 0.75)


def test_a_confidence_that_is_no_number_stays_until_the_end() -> None:
    policy = ExitPolicy((0.0,))
    assert not policy.leaves_at(0, float("nan"))
    assert policy.leaves_at(1, float("nan"))


@given(threshold_lists)
def test_it_survives_json(thresholds: list[float]) -> None:
    policy = ExitPolicy(tuple(thresholds))
    text = json.dumps(policy.to_json(), allow_nan=False)
    assert ExitPolicy.from_json(json.loads(text), len(thresholds)) == policy


@pytest.mark.parametrize(
    "thresholds",
    [
        None,
        0.5,
        "0.5",
        {"0": 0.5},
        [],
        [0.5],
        [0.5, 0.5, 0.5],
        [0.5, "0.5"],
        [0.5, None],
        [0.5, True],
        [0.5, -0.1],
        [0.5, float("nan")],
        [0.5, float("inf")],
        [0.5, 10**400],
    ],
)
def test_other_thresholds_are_refused(thresholds: Any) -> None:
    with pytest.raises(BundleError, match=r"policy\.thresholds.*2 numbers"):
        ExitPolicy.from_json({"score": "max_softmax", "thresholds": thresholds}, 2)


@pytest.mark.parametrize(
    "value", [None, [], "max_softmax", {}, {"score": "entropy", "thresholds": []}]
)
def test_another_kind_of_policy_is_refused(value: Any) -> None:
    with pytest.raises(BundleError, match=r"policy\.score"):
        ExitPolicy.from_json(value, 0)
