"""The classifier: frames in, labels out. What a program that uses edgevit holds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Optional, Type, Union

import numpy as np

from edgevit.bundle import Bundle
from edgevit.engines import open_stages
from edgevit.errors import BundleError
from edgevit.runtime.cascade import Cascade


@dataclass(frozen=True)
class Result:
    """The answer to one frame.

    ``score`` is the softmax confidence (0 to 1) at ``exit`` (from 1). ``latency_ms`` covers
    preprocessing and the stages that ran. ``age_ms`` is the time from capture to answer; it equals
    the latency for a frame that did not come from a camera. ``frame`` numbers the frames from 0 and
    ``time_s`` is the frame's place in its source.
    """

    label: str
    index: int
    score: float
    exit: int
    latency_ms: float
    age_ms: float
    frame: int
    time_s: float


class Classifier:
    """A bundle on an engine.

    >>> clf = Classifier.load("bundle.evb")  # doctest: +SKIP
    >>> clf(cv2.imread("flower.jpg")).label  # doctest: +SKIP
    'daffodil'
    """

    def __init__(self, bundle: Bundle, engine: str = "auto", threads: int = 0) -> None:
        stages = open_stages(bundle, engine=engine, threads=threads)
        self.bundle = bundle
        self.engine = stages.engine
        self.cascade = Cascade(stages, bundle.policy)
        self._frames = 0
        self._warm_up()

    @classmethod
    def load(cls, path: Union[str, Path], engine: str = "auto", threads: int = 0) -> Classifier:
        """Open a bundle file; its hashes are checked first. See :mod:`edgevit.engines` for
        ``engine``; ``threads`` 0 is every core. Raises :class:`edgevit.errors.BundleError` and
        :class:`edgevit.errors.EngineUnavailableError`."""
        return cls(Bundle.load(path), engine, threads)

    def _warm_up(self) -> None:
        """Run every stage once: engines allocate at the first run, and a bundle whose stages do not
        fit together must fail here, not at the first frame that needs the last of them."""
        blank = np.zeros((self.bundle.preprocess.size, self.bundle.preprocess.size, 3), np.uint8)
        try:
            classes = {len(output.logits) for output in self.cascade.trace(blank)}
        except Exception as error:  # each engine has kinds of its own
            raise BundleError(
                f"{self.bundle.path}: its stages do not run on {self.engine} ({error}); "
                "make the bundle again"
            ) from None
        if classes != {len(self.bundle.labels)}:
            raise BundleError(
                f"{self.bundle.path} has {len(self.bundle.labels)} labels and its stages answer with "
                f"{sorted(classes)} classes; make the bundle again"
            )

    def __call__(self, frame_bgr: np.ndarray) -> Result:
        """Classify a frame, ``uint8 [H, W, 3]`` in BGR as OpenCV gives it, of any size."""
        start = time.perf_counter()
        decision = self.cascade.run(self.bundle.preprocess(frame_bgr))
        latency_ms = (time.perf_counter() - start) * 1e3
        number, self._frames = self._frames, self._frames + 1
        return Result(
            label=self.bundle.labels[decision.label_index],
            index=decision.label_index,
            score=decision.confidence,
            exit=decision.exit,
            latency_ms=latency_ms,
            age_ms=latency_ms,
            frame=number,
            time_s=0.0,
        )

    def __enter__(self) -> Classifier:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        """Nothing to release on CPU engines, whose memory goes with the object."""
