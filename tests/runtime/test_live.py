from __future__ import annotations

import os
import signal
import threading
import time
from typing import Callable, Generator, Iterable

import numpy as np
import pytest

from edgevit.errors import DataError
from edgevit.runtime import live
from edgevit.runtime.camera import Camera, Frame, Picture
from edgevit.runtime.classifier import Result
from edgevit.runtime.live import run_live
from edgevit.runtime.meter import Meter


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterable[None]:
    threads = set(threading.enumerate())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert set(threading.enumerate()) <= threads
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


class Source:
    """Pictures filled with their number; ``released`` counts how often it was released."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.released = count, error, 0

    def pictures(self) -> Generator[Picture, None, None]:
        try:
            for number in range(self.count):
                yield np.full((2, 2, 3), number % 256, np.uint8), number / 8
            if self.error is not None:
                raise self.error
        finally:
            self.released += 1

    def camera(self) -> Camera:
        return Camera("numbers", self.pictures(), live=False)


class Recorder:
    """A sink that keeps what it gets, and raises at a frame if told to."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.fails_at, self.error = fails_at, error or OSError("no space left")
        self.results: list[Result] = []
        self.frames: list[Frame] = []
        self.closed = 0

    def write(self, result: Result, frame: Frame) -> None:
        if result.frame == self.fails_at:
            raise self.error
        self.results.append(result)
        self.frames.append(frame)

    def close(self) -> None:
        self.closed += 1


def number_classifier(frame_bgr: np.ndarray) -> Result:
    """Label, exit and latency follow from the picture's number."""
    number = int(frame_bgr[0, 0, 0])
    return Result(
        label=f"n{number}",
        index=number,
        score=0.5,
        exit=number % 3 + 1,
        latency_ms=float(number),
        age_ms=0.0,
        frame=0,
        time_s=0.0,
    )


def test_every_frame_is_classified_and_handed_over_in_order() -> None:
    source, sinks = Source(60), [Recorder(), Recorder()]
    with source.camera() as camera:
        summary = run_live(camera, number_classifier, sinks)
    for sink in sinks:
        assert [result.label for result in sink.results] == [f"n{i}" for i in range(60)]
        assert [result.frame for result in sink.results] == list(range(60))
        assert [result.time_s for result in sink.results] == [i / 8 for i in range(60)]
        assert [int(frame.image_bgr[0, 0, 0]) for frame in sink.frames] == list(range(60))
        assert sink.closed == 1
    assert source.released == 1
    assert summary.frames == 60
    assert summary.stopped_by == "end"
    assert summary.failed_sinks == ()


def test_the_summary_is_arithmetic() -> None:
    with Source(101).camera() as camera:
        summary = run_live(camera, number_classifier)
    assert summary.latency_ms is not None
    # Latencies are 0, 1, ... 100 ms; exits 1, 2, 3, 1, ... of which the last is 101 % 3 = 2.
    assert (summary.latency_ms.p50, summary.latency_ms.p90, summary.latency_ms.p99) == (50, 90, 99)
    assert summary.mean_stages == pytest.approx((33 * 6 + 1 + 2) / 101)
    assert summary.fps == pytest.approx(101 / summary.seconds)


def test_percentiles_are_over_the_latest_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LATENCIES", 11)
    with Source(50).camera() as camera:
        summary = run_live(camera, number_classifier)
    assert summary.latency_ms is not None
    assert summary.latency_ms.p50 == 44  # the middle of 39 to 49
    assert summary.frames == 50


def test_the_age_covers_the_time_to_classify() -> None:
    def slow(frame_bgr: np.ndarray) -> Result:
        time.sleep(0.05)
        return number_classifier(frame_bgr)

    sink = Recorder()
    with Source(3).camera() as camera:
        run_live(camera, slow, [sink])
    assert all(50 <= result.age_ms < 5000 for result in sink.results)


def test_it_stops_after_the_frames_asked_for() -> None:
    source, sink = Source(1000), Recorder()
    with source.camera() as camera:
        summary = run_live(camera, number_classifier, [sink], max_frames=7)
    assert summary.frames == len(sink.results) == 7
    assert summary.stopped_by == "frames"
    assert source.released == 1


def test_a_source_without_frames_has_no_figures() -> None:
    with Source(0).camera() as camera:
        summary = run_live(camera, number_classifier)
    assert (summary.frames, summary.mean_stages, summary.latency_ms) == (0, None, None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_frame_in_hand_finish(number: signal.Signals) -> None:
    def interrupted(frame_bgr: np.ndarray) -> Result:
        if frame_bgr[0, 0, 0] == 5:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return number_classifier(frame_bgr)

    source, sink = Source(1000), Recorder()
    with source.camera() as camera:
        summary = run_live(camera, interrupted, [sink])
    assert [result.frame for result in sink.results] == list(range(6))
    assert summary.stopped_by == number.name
    assert sink.closed == 1
    assert source.released == 1


def test_a_signal_ends_the_wait_for_a_frame() -> None:
    arrived = threading.Event()

    def silent() -> Generator[Picture, None, None]:
        yield np.zeros((2, 2, 3), np.uint8), 0.0
        arrived.wait()

    with Camera("silent", silent(), live=True) as camera:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        summary = run_live(camera, number_classifier)
        arrived.set()
        timer.join()
    assert summary.stopped_by == "SIGINT"
    assert summary.frames == 1


def test_a_second_signal_gets_through_a_classifier_that_hangs() -> None:
    def hangs(frame_bgr: np.ndarray) -> Result:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        raise AssertionError("not interrupted")

    source, sink = Source(10), Recorder()
    with pytest.raises(KeyboardInterrupt), source.camera() as camera:
        run_live(camera, hangs, [sink])
    assert sink.closed == 1
    assert source.released == 1


def test_it_runs_outside_the_main_thread() -> None:
    summaries = []

    def work() -> None:
        with Source(4).camera() as camera:
            summaries.append(run_live(camera, number_classifier))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert [summary.frames for summary in summaries] == [4]


def test_a_sink_that_raises_is_dropped_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, working = Recorder(fails_at=3), Recorder()
    with Source(20).camera() as camera:
        summary = run_live(camera, number_classifier, [failing, working])
    assert [result.frame for result in failing.results] == [0, 1, 2]
    assert [result.frame for result in working.results] == list(range(20))
    assert (failing.closed, working.closed) == (1, 1)
    assert summary.stopped_by == "end"
    assert len(summary.failed_sinks) == 1
    assert "no space left" in summary.failed_sinks[0]
    assert [record.getMessage() for record in caplog.records] == [
        "Recorder is dropped: no space left"
    ]


def test_it_ends_when_no_sink_is_left(caplog: pytest.LogCaptureFixture) -> None:
    sink = Recorder(fails_at=3, error=BrokenPipeError())
    with Source(1000).camera() as camera:
        summary = run_live(camera, number_classifier, [sink])
    assert summary.stopped_by == "sinks"
    assert summary.frames == 4
    assert not caplog.records  # a reader that has enough is nothing to warn of


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open() -> None:
    class Stubborn(Recorder):
        def close(self) -> None:
            super().close()
            raise OSError("can't flush")

    sinks = [Stubborn(), Recorder()]
    with Source(2).camera() as camera:
        run_live(camera, number_classifier, sinks)
    assert [sink.closed for sink in sinks] == [1, 1]


def raises_in_classifier(frame_bgr: np.ndarray) -> Result:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("classify", "source", "error"),
    [
        (raises_in_classifier, Source(9), ZeroDivisionError),
        (number_classifier, Source(9, DataError("cable")), DataError),
    ],
)
def test_errors_are_raised_after_everything_is_closed(
    classify: Callable[[np.ndarray], Result], source: Source, error: type[Exception]
) -> None:
    sink = Recorder()
    with pytest.raises(error), source.camera() as camera:
        run_live(camera, classify, [sink])
    assert sink.closed == 1
    assert source.released == 1


def test_the_meter_counts_every_frame() -> None:
    class Counting(Meter):
        frames = 0

        def __init__(self) -> None: ...  # without its thread

        def add_frame(self) -> None:
            self.frames += 1

    meter = Counting()
    with Source(17).camera() as camera:
        run_live(camera, number_classifier, meter=meter)
    assert meter.frames == 17
