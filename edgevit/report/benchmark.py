"""How much faster a bundle is than what it was made from: the same backbone in eager PyTorch.

Each side lives in a process of its own, so that neither pays for the other's libraries, threads or
memory, and they run in turn (A B A B ...), so that whatever else the machine does meets both. The
side whose turn it is not waits on its pipe. Speed-ups are ratios of the two turns of one round.

Both sides get the same preprocessed frames, one at a time. Cropping and resizing are in neither;
normalisation is in both, because a bundle's graph contains it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import cv2
import numpy as np

from edgevit.bundle import Bundle
from edgevit.errors import BundleError, DataError, EdgevitError, UserError
from edgevit.images import SUFFIXES, read_image
from edgevit.machine import machine_facts, usable_cores

BASELINE = "eager PyTorch float32"

# Frames of a folder that are used, spread evenly over it; more would only lengthen the rounds.
_MAX_FRAMES = 256
# A turn measures at least this many frames, so that its median means something.
_MIN_TURN_FRAMES = 32
# Untimed frames at start-up: libraries allocate, choose kernels and start their threads.
_WARM_UP_FRAMES = 10
# Untimed frames at the start of a turn: the other side has had the caches.
_REWARM_FRAMES = 3
# OpenMP and thread pools keep spinning after a parallel region (Intel's for 200 ms) and would take
# the cores from the side that follows. A passive wait policy would stop that but slow down the
# side it is set for, so both sides keep their defaults and the turns are this far apart instead.
_SETTLE_S = 0.3
# Longer than any start or turn takes; a worker that is silent for so long hangs.
_ANSWER_S = 900.0

# What a worker's interpreter runs, with the caller's import path and its end of the pipe.
_CHILD = """import sys
descriptor, *sys.path = sys.argv[1:]
from edgevit.report.benchmark import _serve
_serve(int(descriptor))
"""

# Runs one frame (uint8 [S, S, 3] RGB) and returns how many stages it took.
_Classify = Callable[[np.ndarray], int]


@dataclass(frozen=True)
class _Side:
    """What a worker has built: how to classify, how to touch everything once, and what it is."""

    classify: _Classify
    warm_up: Callable[[np.ndarray], object]
    facts: Dict[str, Any]


class _CannotRunError(EdgevitError):
    """The baseline can't exist on this machine; the bundle's own figures are still wanted."""


@dataclass(frozen=True)
class Turn:
    """One side's frames in one round; ``started_s`` counts from the first turn."""

    side: str
    round: int
    started_s: float
    latency_ms: Tuple[float, ...]
    stages_run: Tuple[int, ...]

    @property
    def typical_ms(self) -> float:
        """What a frame costs: the median of the frames that leave at an exit, weighted by their share.

        Exits make latencies fall into groups, and a median over all would be that of one group. A
        mean would be right on a quiet machine; on a busy one a few interrupted frames make it, and
        they hurt the slower side more.
        """
        latency_ms, stages_run = np.array(self.latency_ms), np.array(self.stages_run)
        return float(
            sum(
                np.median(latency_ms[stages_run == stages]) * np.mean(stages_run == stages)
                for stages in np.unique(stages_run)
            )
        )

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.latency_ms))

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.latency_ms))


@dataclass(frozen=True)
class Benchmark:
    """The turns of both sides in the order they ran, and what ran them.

    ``baseline`` is None where PyTorch or the backbone is not to be had: ``baseline_reason`` says
    why, and there is no speed-up then.
    """

    bundle: Dict[str, Any]
    baseline: Optional[Dict[str, Any]]
    baseline_reason: Optional[str]
    turns: Tuple[Turn, ...]
    stages: int
    frames: int
    threads: int
    created: str
    machine: Dict[str, Any]

    def speedups(self, statistic: Callable[[Turn], float]) -> List[float]:
        """Per round: ``statistic`` of the baseline's turn over that of the bundle's."""
        by_round: Dict[int, Dict[str, float]] = {}
        for turn in self.turns:
            by_round.setdefault(turn.round, {})[turn.side] = statistic(turn)
        return [
            sides["baseline"] / sides["bundle"] for sides in by_round.values() if len(sides) == 2
        ]

    def to_json(self) -> Dict[str, Any]:
        """The figures as ``edgevit bench --json`` prints them.

        ``speedup``, the headline, compares typical latencies (:attr:`Turn.typical_ms`: medians by
        exit, weighted by share); ``speedup_mean`` and ``speedup_p50`` stand beside it.
        """
        return {
            "baseline": self._summary("baseline", self.baseline),
            "baseline_reason": self.baseline_reason,
            "bundle": self._summary("bundle", self.bundle),
            "speedup": _spread(
                self.speedups(lambda turn: turn.typical_ms),
                "median latency of the frames that leave at an exit, weighted by their share",
            ),
            "speedup_mean": _spread(self.speedups(lambda turn: turn.mean_ms), "mean latency"),
            "speedup_p50": _spread(self.speedups(lambda turn: turn.p50_ms), "median latency"),
            "runs": [
                {
                    "round": turn.round,
                    "side": turn.side,
                    "started_s": round(turn.started_s, 3),
                    "latency_ms_typical": _ms(turn.typical_ms),
                    "latency_ms_p50": _ms(turn.p50_ms),
                    "latency_ms_mean": _ms(turn.mean_ms),
                }
                for turn in self.turns
            ],
            "frames": self.frames,
            "threads": self.threads,
            "created": self.created,
            "machine": self.machine,
        }

    def _summary(self, side: str, facts: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
        if facts is None:
            return None
        turns = [turn for turn in self.turns if turn.side == side]
        latency_ms = np.concatenate([turn.latency_ms for turn in turns])
        typical_ms = [turn.typical_ms for turn in turns]
        summary = {
            **facts,
            "latency_ms_typical": _ms(np.median(typical_ms)),
            "latency_ms_p50": _ms(np.median(latency_ms)),
            "latency_ms_p90": _ms(np.percentile(latency_ms, 90)),
            "latency_ms_p99": _ms(np.percentile(latency_ms, 99)),
            "latency_ms_mean": _ms(np.mean(latency_ms)),
            # Smallest and largest of a round: what repeating the measurement would move.
            "latency_ms_typical_spread": [_ms(min(typical_ms)), _ms(max(typical_ms))],
        }
        if side == "bundle":
            # Every round runs the same frames, so the first one's exits are everyone's.
            stages_run = np.array(turns[0].stages_run)
            counts = np.bincount(stages_run, minlength=self.stages + 1)[1:]
            summary["mean_stages"] = round(float(stages_run.mean()), 4)
            summary["exit_share"] = [round(float(c), 4) for c in counts / len(stages_run)]
        return summary


def bench(
    bundle_path: Union[str, Path],
    images: Optional[np.ndarray] = None,
    engine: str = "auto",
    threads: int = 0,
    rounds: int = 7,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Benchmark:
    """Measure a bundle, with the exits its frames take, against its backbone in eager PyTorch.

    ``images``: preprocessed frames ``uint8 [n, S, S, 3]`` RGB (:func:`load_frames`); by default the
    bundle's check images. ``threads``: for both sides alike; 0 is every core this process may use.
    ``progress`` gets turns done and in all.

    The baseline is built from the manifest's model name and sizes, with random weights, on whose
    values its latency does not depend, and with a plain linear head. Its timed region is what one
    would write: to float, normalise, to NCHW, ``torch.inference_mode``, batch 1, the class index
    back on the host.

    Raises :class:`UserError` for a bundle without check images and no ``images``, and
    :class:`EdgevitError` for a worker that dies or hangs; no process is left behind on any path.
    """
    bundle = Bundle.load(bundle_path)
    frames = load_frames(bundle) if images is None else images
    _check_request(bundle, frames, threads, rounds)
    threads = threads or usable_cores()
    machine = machine_facts()
    workers: Dict[str, _Worker] = {}
    turns: List[Turn] = []
    reason = None
    total = 2 * rounds
    progress(0, total)
    try:
        workers["bundle"] = _Worker("bundle")
        arguments: Tuple[Any, ...] = (str(bundle_path), engine, threads)
        facts = {"bundle": workers["bundle"].prepare(_bundle_side, arguments, frames)}
        workers["baseline"] = _Worker("baseline")
        spec = bundle.preprocess
        arguments = (
            bundle.manifest.get("model"),
            len(bundle.labels),
            spec.mean,
            spec.std,
            threads,
        )
        try:
            facts["baseline"] = workers["baseline"].prepare(_baseline_side, arguments, frames)
        except _CannotRunError as error:
            reason = str(error)
            workers.pop("baseline").close()
            total = rounds
        start = time.perf_counter()
        for number in range(1, rounds + 1):
            # Baseline first, then bundle, in every round.
            for side in ("baseline", "bundle"):
                if side not in workers:
                    continue
                time.sleep(_SETTLE_S)
                started_s = time.perf_counter() - start
                latency_ms, stages_run = workers[side].ask("turn")
                turns.append(Turn(side, number, started_s, latency_ms, stages_run))
                progress(len(turns), total)
        for side, worker in workers.items():
            facts[side]["peak_memory_bytes"] = worker.ask("finish")
    finally:
        for worker in workers.values():
            worker.close()
    return Benchmark(
        bundle=facts["bundle"],
        baseline=facts.get("baseline"),
        baseline_reason=reason,
        turns=tuple(turns),
        stages=len(bundle.stages),
        frames=len(frames),
        threads=threads,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine,
    )


def load_frames(bundle: Bundle, folder: Union[str, Path, None] = None) -> np.ndarray:
    """Frames to measure with: ``uint8 [n, S, S, 3]`` RGB.

    From the images in ``folder`` and the folders below it (at most 256, spread evenly), or from the
    bundle's check images. Raises :class:`UserError` where there are none, :class:`DataError` for an
    image that can't be read.
    """
    if folder is not None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give a folder of images with --data")
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not paths:
            raise DataError(
                f"{folder} holds no images ({', '.join(SUFFIXES)}); give another --data"
            )
        rows = np.linspace(0, len(paths) - 1, min(len(paths), _MAX_FRAMES)).astype(int)
        return np.stack([bundle.preprocess(read_image(paths[row])) for row in rows])
    if not bundle.check_images:
        raise UserError(
            f"{bundle.path} holds no check images; give a folder of real images with --data, "
            "because the exits that frames take depend on what they show"
        )
    frames = []
    for image in bundle.check_images:
        data = np.frombuffer(bundle.read(image.file), np.uint8)
        decoded = cv2.imdecode(data, cv2.IMREAD_COLOR) if len(data) else None
        if decoded is None:
            raise BundleError(f"{bundle.path}: '{image.file}' is no image; make the bundle again")
        frames.append(cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB))
    if len({frame.shape for frame in frames}) > 1:
        raise BundleError(f"{bundle.path}: check images differ in size; make the bundle again")
    return np.stack(frames)


def _check_request(bundle: Bundle, frames: np.ndarray, threads: int, rounds: int) -> None:
    size = bundle.preprocess.size
    if frames.dtype != np.uint8 or frames.shape[1:] != (size, size, 3) or not len(frames):
        raise UserError(
            f"frames must be uint8 [n, {size}, {size}, 3], not {frames.dtype} {list(frames.shape)}; "
            "preprocess them with the bundle's preprocessing"
        )
    if rounds < 1:
        raise UserError(f"rounds = {rounds}: give at least 1")
    if threads < 0:
        raise UserError(f"threads = {threads}: give 0 (all cores) or more")


class _Worker:
    """The parent's end of one side's process."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._pipe, theirs = multiprocessing.Pipe()
        # A fresh interpreter. A fork would inherit torch's locks and thread pools from a parent that
        # has used them; multiprocessing's "spawn" would run the caller's script a second time.
        # Ctrl-C reaches every process of the terminal: the child is born with SIGINT blocked, so
        # that the parent alone answers it, and ends the child.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our interpreter and our text
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard error: the caller's standard output may be JSON
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()  # so that the child's death reads as the end of the pipe

    def prepare(
        self, build: Callable[..., _Side], arguments: Tuple[Any, ...], frames: np.ndarray
    ) -> Dict[str, Any]:
        """Have the side built and warmed up; its facts."""
        # The frames are more than a pipe holds: a child that never came to read them would block
        # the send for ever.
        self.answer()
        return dict(self.ask((build, arguments, frames)))

    def ask(self, what: object) -> Any:
        with contextlib.suppress(OSError):  # dead: its answer says how it ended
            self._pipe.send(what)
        return self.answer()

    def answer(self) -> Any:
        """What the worker sends next; raises what it raised, or :class:`EdgevitError` if it can't."""
        try:
            if not self._pipe.poll(_ANSWER_S):
                raise EdgevitError(
                    f"the {self._side}'s process gave no answer for {_ANSWER_S:.0f} s and was ended; "
                    "see whether the machine swaps, and run again with fewer frames"
                )
            answer = self._pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise EdgevitError(_epitaph(self._side, self._process.returncode)) from None
        if isinstance(answer, EdgevitError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _epitaph(side: str, exitcode: Optional[int]) -> str:
    if exitcode == -signal.SIGKILL:
        return (
            f"the {side}'s process was killed (signal 9), which is what the system does when memory "
            "runs out; close other programs or measure on a machine with more memory"
        )
    if exitcode is not None and exitcode < 0:
        return (
            f"the {side}'s process crashed: {signal.Signals(-exitcode).name}; try another --engine"
        )
    return f"the {side}'s process ended early with status {exitcode}; its message is above"


def _serve(descriptor: int) -> None:
    """The worker: build, warm up, then one turn for every "turn" until "finish"."""
    pipe = Connection(descriptor)
    try:
        try:
            pipe.send("here")
            build, arguments, frames = pipe.recv()
            side = build(*arguments)
            for frame in frames[:_WARM_UP_FRAMES]:
                side.warm_up(frame)
            pipe.send(side.facts)
            while pipe.recv() == "turn":
                pipe.send(_turn(side, frames))
            pipe.send(_peak_memory_bytes())
        except EdgevitError as error:
            pipe.send(error)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            pipe.send(EdgevitError(f"{type(error).__name__} in a benchmark process: {error}"))
    except (EOFError, ConnectionError):
        return  # the parent is gone, and nobody wants the rest


def _turn(side: _Side, frames: np.ndarray) -> Tuple[Tuple[float, ...], Tuple[int, ...]]:
    for frame in frames[:_REWARM_FRAMES]:
        side.warm_up(frame)
    latency_ms: List[float] = []
    stages_run: List[int] = []
    for _ in range(math.ceil(_MIN_TURN_FRAMES / len(frames))):
        for frame in frames:
            start = time.perf_counter()
            stages = side.classify(frame)
            latency_ms.append((time.perf_counter() - start) * 1e3)
            stages_run.append(stages)
    return tuple(latency_ms), tuple(stages_run)


def _bundle_side(path: str, engine: str, threads: int) -> _Side:
    from edgevit.engines import open_stages
    from edgevit.runtime.cascade import Cascade

    bundle = Bundle.load(path)
    stages = open_stages(bundle, engine=engine, threads=threads)
    cascade = Cascade(stages, bundle.policy)
    return _Side(
        classify=lambda frame: cascade.run(frame).exit,
        warm_up=cascade.trace,  # all stages, whatever the frame shows
        facts={"name": bundle.name, "engine": stages.engine},
    )


def _baseline_side(
    model: Any,
    classes: int,
    mean: Tuple[float, float, float],
    std: Tuple[float, float, float],
    threads: int,
) -> _Side:
    try:
        import torch

        from edgevit.compress.backbone import create_backbone
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise _CannotRunError(
            f"no baseline: PyTorch and timm do not import here ({error}); "
            "install edgevit[workstation] to compare with them"
        ) from None
    try:
        name, image_size, patch_size = model["name"], model["image_size"], model["patch_size"]
        backbone = create_backbone(name, image_size, patch_size)
    except (KeyError, TypeError):
        raise _CannotRunError("no baseline: the bundle does not say its model's sizes") from None
    except EdgevitError as error:
        raise _CannotRunError(f"no baseline: {error}") from None
    backbone.reset_classifier(classes)
    backbone.eval()
    torch.set_num_threads(threads)
    mean_t = torch.tensor(mean).view(1, 3, 1, 1)
    std_t = torch.tensor(std).view(1, 3, 1, 1)

    def classify(frame: np.ndarray) -> int:
        with torch.inference_mode():
            pixels = torch.from_numpy(frame).permute(2, 0, 1)[None].float().contiguous()
            logits = backbone(pixels.div_(255).sub_(mean_t).div_(std_t))
            int(logits.argmax())
        return 1

    return _Side(classify, classify, {"name": BASELINE, "model": str(name)})


def _peak_memory_bytes() -> Optional[int]:
    """The largest resident size this process had; None where the kernel does not tell.

    Not ``getrusage``: its maximum is inherited over exec and would be the parent's.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _spread(values: List[float], statistic: str) -> Optional[Dict[str, Any]]:
    if not values:
        return None
    return {
        "median": round(float(np.median(values)), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "statistic": statistic,
        "per_round": [round(value, 3) for value in values],
    }


def _ms(value: Any) -> float:
    return round(float(value), 4)
