"""Train the exit heads on cached features: quick, exact and the same every time.

The backbone is frozen, so that a head is a linear classifier: L2-regularised multinomial logistic
regression, whose minimum is unique. L-BFGS finds it; cross-validation chooses the regularisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Candidate strengths of the L2 penalty on the weights of standardised features, per sample. From
# strong to weak: a strong one is quick to solve, and each solution is near the next.
_PENALTIES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)


@dataclass(frozen=True)
class FittedHead:
    """``logits = features @ weight.T + bias``, with the cross-fitted logits of the training images.

    ``weight [classes, D]``, ``bias [classes]``, ``held_out_logits [n, classes]``: row i was computed
    by a head that was fitted without image i, at the same penalty.
    """

    weight: np.ndarray
    bias: np.ndarray
    held_out_logits: np.ndarray
    penalty: float


def fit_head(
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    fold_of: np.ndarray,
) -> FittedHead:
    """Fit one head on ``features [n, D]`` and ``labels [n]``.

    ``fold_of [n]`` numbers the folds from 0. The penalty with the lowest held-out log loss is kept.
    """
    n = len(features)
    mean = features.mean(0)
    std = features.std(0) + 1e-6
    x = torch.from_numpy((features - mean) / std).float()
    y = torch.from_numpy(labels).long()
    folds = int(fold_of.max()) + 1
    held_out: list[Tensor] = []
    losses: list[float] = []
    starts: list[Tensor | None] = [None] * folds
    for penalty in _PENALTIES:
        logits = torch.zeros(n, classes)
        for fold in range(folds):
            inside, outside = fold_of == fold, fold_of != fold
            solution = _logistic_regression(x[outside], y[outside], classes, penalty, starts[fold])
            starts[fold] = solution  # the next penalty's minimum is near
            logits[inside] = x[inside] @ solution[:-1] + solution[-1]
        held_out.append(logits)
        losses.append(float(functional.cross_entropy(logits, y)))
    best = int(np.argmin(losses))
    solution = _logistic_regression(x, y, classes, _PENALTIES[best], None)
    weight = solution[:-1].T.double().numpy() / std
    bias = solution[-1].double().numpy() - weight @ mean
    return FittedHead(
        np.ascontiguousarray(weight, np.float32),
        bias.astype(np.float32),
        held_out[best].numpy(),
        _PENALTIES[best],
    )


def assign_folds(labels: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """A fold number for each image, spread evenly within each class.

    Every class is in every fold where it has enough images; a class with one image is held out
    once, and then known by none of the other folds' heads.
    """
    generator = np.random.default_rng(seed)
    fold_of = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        # The start differs by class, so that small classes do not all fall into the first folds.
        fold_of[members] = (np.arange(len(members)) + label) % folds
    return fold_of


def _logistic_regression(
    x: Tensor, y: Tensor, classes: int, penalty: float, start: Tensor | None
) -> Tensor:
    """Minimise mean cross-entropy + penalty/2 * |weights|^2; ``[D + 1, classes]``, bias last."""
    parameters = torch.zeros(x.shape[1] + 1, classes) if start is None else start.clone()
    parameters.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters],
        max_iter=200,
        tolerance_grad=1e-5,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(x @ parameters[:-1] + parameters[-1], y)
        value = value + penalty / 2 * parameters[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return parameters.detach()
