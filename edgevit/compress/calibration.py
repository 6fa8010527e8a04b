"""The calibration table: per-tensor ranges from real images, with the evidence behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from edgevit.compress.calibrators import CALIBRATORS
from edgevit.compress.export import PIXELS
from edgevit.compress.graph import linear_layers
from edgevit.compress.histogram import Histogram
from edgevit.errors import DataError, ModelError

INT8_MAX = 127.0


# A range below this would have an INT8 step that float32 can't hold.
_SMALLEST_AMAX = INT8_MAX * float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class CalibrationTable:
    """Range of each tensor, by stage file and tensor name, and where it comes from.

    ``amax`` is the largest magnitude that INT8 keeps, ``clipped`` the share of the tensor's values
    beyond it. ``images_sha256`` is over the preprocessed pixels in order; ``graphs`` holds the sha256
    of each float stage graph; ``missing_classes`` names the classes of the data that no image showed.
    """

    calibrator: str
    images: int
    images_sha256: str
    preprocess_hash: str
    missing_classes: tuple[str, ...]
    graphs: dict[str, str]
    amax: dict[str, dict[str, float]] = field(repr=False)
    clipped: dict[str, dict[str, float]] = field(repr=False)

    def scale(self, stage: str, tensor: str) -> float:
        """INT8 step of a tensor: ``value = scale * q`` with ``q`` from -128 to 127."""
        return self.amax[stage][tensor] / INT8_MAX

    def evidence(self) -> dict[str, Any]:
        """Everything but the ranges: what they rest on."""
        shares = [share for tensors in self.clipped.values() for share in tensors.values()]
        return {
            "calibrator": self.calibrator,
            "images": self.images,
            "images_sha256": self.images_sha256,
            "preprocess_hash": self.preprocess_hash,
            "missing_classes": list(self.missing_classes),
            "graphs": self.graphs,
            "tensors": len(shares),
            "clipped_tensors": sum(share > 0 for share in shares),
            "largest_clipped_share": max(shares),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "edgevit-calibration",
            "version": 1,
            **self.evidence(),
            "amax": self.amax,
            "clipped": self.clipped,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CalibrationTable:
        names = {f.name for f in fields(cls)}
        table = {key: item for key, item in value.items() if key in names}
        return cls(**{**table, "missing_classes": tuple(table["missing_classes"])})


# By stage file and tensor: the mean of each channel, float32 [channels].
ChannelMeans = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Calibration:
    """What the calibration images showed; every calibrator makes its table from this.

    ``histograms`` and ``means`` are by stage file and tensor; the rest is as in the table.
    """

    images: int
    images_sha256: str
    preprocess_hash: str
    missing_classes: tuple[str, ...]
    graphs: dict[str, str]
    histograms: dict[str, dict[str, Histogram]] = field(repr=False)
    means: ChannelMeans = field(repr=False)

    def table(self, calibrator: str) -> CalibrationTable:
        """The ranges by ``calibrator``, a name of
        :data:`~edgevit.compress.calibrators.CALIBRATORS`."""
        amax: dict[str, dict[str, float]] = {}
        clipped: dict[str, dict[str, float]] = {}
        for name, histograms in self.histograms.items():
            amax[name], clipped[name] = {}, {}
            for tensor, histogram in histograms.items():
                if tensor == PIXELS:
                    # Whole numbers from -128 to 127: scale 1 holds them without loss.
                    amax[name][tensor], clipped[name][tensor] = INT8_MAX, 0.0
                    continue
                found = CALIBRATORS[calibrator](histogram)
                # A tensor that is always zero still needs a scale that is not.
                amax[name][tensor] = found if found >= _SMALLEST_AMAX else 1.0
                clipped[name][tensor] = histogram.share_above(amax[name][tensor])
        return CalibrationTable(
            calibrator,
            self.images,
            self.images_sha256,
            self.preprocess_hash,
            self.missing_classes,
            self.graphs,
            amax,
            clipped,
        )


def calibrate(
    stages: dict[str, onnx.ModelProto],
    images: np.ndarray,
    preprocess_hash: str,
    missing_classes: Sequence[str] = (),
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Run ``images`` (uint8 ``[n, S, S, 3]``) once through the float stages; count magnitudes.

    Covers the input of each linear layer. Memory is that of one image's activations and one histogram
    a tensor, however many images there are. Raises :class:`DataError` for no images, and
    :class:`ModelError`, with the tensor and the image's number, for a value that is not finite.
    """
    if not len(images):
        raise DataError("calibration needs real images and got none; add training images")
    tensors = {
        name: sorted({layer.activation for layer in linear_layers(model)})
        for name, model in stages.items()
    }
    watched = {name: _Watched(model, tensors[name], threads) for name, model in stages.items()}
    histograms = {name: {t: Histogram() for t in found} for name, found in tensors.items()}
    sums: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(found, 0.0) for name, found in tensors.items()
    }
    for number, image in enumerate(images):
        tokens = image[None]
        for name in stages:
            values, tokens = watched[name].run(tokens)
            for tensor, value in values.items():
                try:
                    histograms[name][tensor].add(value)
                except ValueError as error:
                    raise ModelError(
                        f"calibration: '{tensor}' in {name} is {error} for calibration image {number}"
                        "; the float model is broken for it, so check the checkpoint"
                    ) from None
                axes = tuple(range(value.ndim - 1))
                sums[name][tensor] += value.mean(axis=axes, dtype=np.float64)
        progress(number + 1, len(images))
    means = {
        name: {tensor: (total / len(images)).astype(np.float32) for tensor, total in found.items()}
        for name, found in sums.items()
    }
    return Calibration(
        len(images),
        hashlib.sha256(images.tobytes()).hexdigest(),
        preprocess_hash,
        tuple(missing_classes),
        {name: hashlib.sha256(m.SerializeToString()).hexdigest() for name, m in stages.items()},
        histograms,
        means,
    )


class _Watched:
    """A float stage that also gives the values of inner tensors."""

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[str], threads: int) -> None:
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
        # Idle threads of one stage would spin and take the cores from the next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._input = model.graph.input[0].name
        self._tensors = tensors
        self._tokens = ["tokens"] if "tokens" in outputs else []

    def run(self, value: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The tensors by name, and the tokens for the next stage (empty in the last)."""
        found = self._session.run([*self._tensors, *self._tokens], {self._input: value})
        tokens = found.pop() if self._tokens else np.empty(0)
        return dict(zip(self._tensors, found, strict=True)), tokens


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
