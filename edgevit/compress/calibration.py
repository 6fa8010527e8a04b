"""The calibration table: per-tensor ranges from real images, with the evidence behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from edgevit.compress.export import PIXELS
from edgevit.compress.graph import linear_layers
from edgevit.errors import DataError, ModelError

INT8_MAX = 127.0


@dataclass(frozen=True)
class CalibrationTable:
    """Largest magnitude of each tensor, by stage file and tensor name, and where it comes from.

    ``images_sha256`` is over the preprocessed pixels in order; ``graphs`` holds the sha256 of each
    float stage graph; ``missing_classes`` names the classes of the data that no image showed.
    """

    calibrator: str
    images: int
    images_sha256: str
    preprocess_hash: str
    missing_classes: tuple[str, ...]
    graphs: dict[str, str]
    amax: dict[str, dict[str, float]] = field(repr=False)

    def scale(self, stage: str, tensor: str) -> float:
        """INT8 step of a tensor: ``value = scale * q`` with ``q`` from -128 to 127."""
        return self.amax[stage][tensor] / INT8_MAX

    def evidence(self) -> dict[str, Any]:
        """Everything but the ranges: what they rest on."""
        return {
            "calibrator": self.calibrator,
            "images": self.images,
            "images_sha256": self.images_sha256,
            "preprocess_hash": self.preprocess_hash,
            "missing_classes": list(self.missing_classes),
            "graphs": self.graphs,
            "tensors": sum(len(ranges) for ranges in self.amax.values()),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "edgevit-calibration",
            "version": 1,
            **self.evidence(),
            "amax": self.amax,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CalibrationTable:
        names = {f.name for f in fields(cls)}
        table = {key: item for key, item in value.items() if key in names}
        return cls(**{**table, "missing_classes": tuple(table["missing_classes"])})


# By stage file and tensor: the mean of each channel, float32 [channels].
ChannelMeans = dict[str, dict[str, np.ndarray]]


def calibrate(
    stages: dict[str, onnx.ModelProto],
    images: np.ndarray,
    preprocess_hash: str,
    missing_classes: Sequence[str] = (),
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CalibrationTable, ChannelMeans]:
    """Run ``images`` (uint8 ``[n, S, S, 3]``) through the float stages; record ranges and means.

    Covers the input of each linear layer. Raises :class:`DataError` for no images, and
    :class:`ModelError`, with the tensor and the image's number, for a value that is not finite.
    """
    if not len(images):
        raise DataError("calibration needs real images and got none; add training images")
    amax: dict[str, dict[str, float]] = {}
    means: ChannelMeans = {}
    inputs: list[np.ndarray] = [image[None] for image in images]
    steps = len(stages) * len(images)
    for position, (name, model) in enumerate(stages.items()):
        tensors = sorted({layer.activation for layer in linear_layers(model)})
        ranges = dict.fromkeys(tensors, 0.0)
        sums: dict[str, np.ndarray] = {}
        outputs: list[np.ndarray] = []
        for number, values in enumerate(observe(model, tensors, inputs, threads)):
            outputs.append(values.pop("tokens", np.empty(0)))
            for tensor, value in values.items():
                largest = float(np.abs(value).max())
                if not np.isfinite(largest):
                    raise ModelError(
                        f"calibration: '{tensor}' in {name} is not finite for calibration image {number}"
                        "; the float model is broken for it, so check the checkpoint"
                    )
                ranges[tensor] = max(ranges[tensor], largest)
                mean = value.mean(axis=tuple(range(value.ndim - 1)), dtype=np.float64)
                sums[tensor] = sums.get(tensor, 0.0) + mean
            progress(position * len(images) + number + 1, steps)
        # A tensor that is always zero still needs a scale that is not.
        amax[name] = {tensor: value or 1.0 for tensor, value in ranges.items()}
        means[name] = {t: (total / len(images)).astype(np.float32) for t, total in sums.items()}
        if PIXELS in ranges:
            # Whole numbers from -128 to 127: scale 1 holds them without loss.
            amax[name][PIXELS] = INT8_MAX
        inputs = outputs
    table = CalibrationTable(
        "min-max",
        len(images),
        hashlib.sha256(images.tobytes()).hexdigest(),
        preprocess_hash,
        tuple(missing_classes),
        {name: hashlib.sha256(m.SerializeToString()).hexdigest() for name, m in stages.items()},
        amax,
    )
    return table, means


def observe(
    model: onnx.ModelProto, tensors: Sequence[str], inputs: Sequence[np.ndarray], threads: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Run a float graph on each input and yield the values of ``tensors`` (and ``tokens``)."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    outputs = {output.name for output in model.graph.output}
    for tensor in tensors:
        if tensor not in outputs:
            tapped.graph.output.append(
                helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None)
            )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = [*tensors, *(["tokens"] if "tokens" in outputs else [])]
    for value in inputs:
        found = session.run(wanted, {model.graph.input[0].name: value})
        yield dict(zip(wanted, found, strict=True))


def choose_images(labels: Sequence[int] | np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of ``count`` images (all, if there are fewer), spread evenly over the classes."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    rank: dict[int, int] = {}
    keys = []
    for index in order:
        label = labels[index]
        rank[label] = rank.get(label, -1) + 1
        keys.append(rank[label])
    # The first of every class, then the second of every class, and so on.
    chosen = order[np.argsort(keys, kind="stable")][:count]
    return np.sort(chosen)
