from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.compress import heads
from edgevit.compress.heads import assign_folds, fit_head


@pytest.fixture
def blobs() -> tuple[np.ndarray, np.ndarray]:
    """Three overlapping clouds in five dimensions of very different scales."""
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 40)
    features = generator.normal(size=(120, 5)) + 1.5 * np.eye(3, 5)[labels]
    return (features * [1, 100, 0.01, 5, 1] + 3).astype(np.float32), labels


def test_the_head_is_the_minimum_of_the_penalised_loss(
    blobs: tuple[np.ndarray, np.ndarray],
) -> None:
    """At the minimum the gradient is zero; it is computed here in float64, by hand."""
    features, labels = blobs
    head = fit_head(features, labels, 3, assign_folds(labels, 5, 0))
    mean, std = features.mean(0), features.std(0) + 1e-6
    x = (features.astype(np.float64) - mean) / std
    weight = head.weight.astype(np.float64) * std
    logits = features.astype(np.float64) @ head.weight.T + head.bias
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    residual = (probabilities - np.eye(3)[labels]) / len(labels)
    assert np.abs(residual.T @ x + head.penalty * weight).max() < 1e-3
    assert np.abs(residual.sum(0)).max() < 1e-3


def test_held_out_logits_know_nothing_of_their_own_label(
    blobs: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = blobs
    monkeypatch.setattr(heads, "_PENALTIES", (1e-2,))
    fold_of = assign_folds(labels, 4, 0)
    before = fit_head(features, labels, 3, fold_of).held_out_logits
    wrong = labels.copy()
    wrong[fold_of == 2] = 0  # lies about every label of one fold
    after = fit_head(features, wrong, 3, fold_of).held_out_logits
    np.testing.assert_allclose(after[fold_of == 2], before[fold_of == 2], atol=1e-5)
    assert np.abs(after[fold_of != 2] - before[fold_of != 2]).max() > 0.1


def test_fitting_twice_gives_the_same_bits(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    features, labels = blobs
    fold_of = assign_folds(labels, 5, 0)
    one, two = (fit_head(features, labels, 3, fold_of) for _ in range(2))
    np.testing.assert_array_equal(one.weight, two.weight)
    np.testing.assert_array_equal(one.held_out_logits, two.held_out_logits)


@given(
    labels=st.lists(st.integers(0, 6), min_size=2, max_size=200).map(np.array),
    folds=st.integers(2, 8),
    seed=st.integers(0, 3),
)
def test_folds_are_even_within_each_class(labels: np.ndarray, folds: int, seed: int) -> None:
    fold_of = assign_folds(labels, folds, seed)
    assert ((fold_of >= 0) & (fold_of < folds)).all()
    for label in np.unique(labels):
        counts = np.bincount(fold_of[labels == label], minlength=folds)
        assert counts.max() - counts.min() <= 1
