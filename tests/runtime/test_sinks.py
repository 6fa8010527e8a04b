from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevit.runtime.camera import Frame
from edgevit.runtime.classifier import Result
from edgevit.runtime.meter import Energy, Meter, Reading
from edgevit.runtime.sinks import JsonLinesSink, LinesSink, ViewSink, terminal_sink

FRAME = Frame(np.zeros((2, 2, 3), np.uint8), index=7, time_s=0.25, captured_at_s=0.0)


def result(**changes: object) -> Result:
    values: dict[str, object] = {
        "label": "hat",
        "index": 1,
        "score": 0.875,
        "exit": 2,
        "latency_ms": 4.5,
        "age_ms": 6.25,
        "frame": 7,
        "time_s": 0.25,
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class CountingStream(io.StringIO):
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def test_json_lines_have_exactly_the_agreed_keys_and_values() -> None:
    stream = CountingStream()
    JsonLinesSink(stream).write(result(), FRAME)
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "frame": 7,
        "time_s": 0.25,
        "label": "hat",
        "score": 0.875,
        "exit": 2,
        "latency_ms": 4.5,
        "age_ms": 6.25,
    }
    assert stream.flushes == 1


def test_json_lines_turn_numpy_numbers_into_plain_ones() -> None:
    stream = io.StringIO()
    numbers = result(score=np.float32(0.5), exit=np.int64(3), latency_ms=np.float64(1.5))
    JsonLinesSink(stream).write(numbers, FRAME)
    line = json.loads(stream.getvalue())
    assert (line["score"], line["exit"], line["latency_ms"]) == (0.5, 3, 1.5)


@given(
    label=st.text(),
    score=st.floats(0, 1),
    frame=st.integers(0, 2**40),
    time_s=st.floats(0, 1e7),
    age_ms=st.floats(0, 1e7),
)
def test_json_lines_are_one_line_that_reads_back(
    label: str, score: float, frame: int, time_s: float, age_ms: float
) -> None:
    stream = io.StringIO()
    wanted = result(label=label, score=score, frame=frame, time_s=time_s, age_ms=age_ms)
    JsonLinesSink(stream).write(wanted, FRAME)
    assert stream.getvalue().count("\n") == 1
    line = json.loads(stream.getvalue())
    assert (line["label"], line["score"], line["frame"]) == (label, score, frame)
    assert line["time_s"] == pytest.approx(time_s, abs=1e-6)
    assert line["age_ms"] == pytest.approx(age_ms, abs=1e-3)


def test_json_lines_refuse_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        JsonLinesSink(io.StringIO()).write(result(score=float("nan")), FRAME)


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = CountingStream()
    sink = terminal_sink(stream)
    assert isinstance(sink, LinesSink)
    sink.write(result(), FRAME)
    sink.write(result(frame=8, label="shirt"), FRAME)
    assert stream.flushes == 2
    sink.close()
    first, second = stream.getvalue().splitlines()
    assert first == "frame 7  0.25 s  hat  0.88  exit 2  4.5 ms"
    assert "shirt" in second


def test_one_view_on_a_terminal_that_ends_with_the_last_result() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    sink = terminal_sink(stream)
    assert isinstance(sink, ViewSink)
    for number in range(50):  # faster than it redraws
        sink.write(result(frame=number, label=f"label{number}"), FRAME)
    sink.close()
    text = stream.getvalue()
    assert "label0" in text
    assert text.rindex("label49") > text.rindex("label0")
    assert text.count("exit") < 10
    assert "latency 4.5 ms" in text
    assert "\x1b[?25h" in text  # the cursor is shown again


def test_a_label_is_not_read_as_markup() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    sink = ViewSink(stream)
    sink.write(result(label="[bold]x[/bold] [/nothing]"), FRAME)
    sink.close()
    assert "[bold]x[/bold] [/nothing]" in stream.getvalue()


def test_plain_lines_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert isinstance(terminal_sink(Terminal()), LinesSink)


class Measured(Meter):
    """A meter without a thread, that has measured what it is told."""

    def __init__(self, reading: Reading, energy: Energy | None) -> None:
        self._told = reading, energy

    def read(self, wait_s: float = 0.0) -> Reading:
        return self._told[0]

    def recent_energy(self) -> Energy | None:
        return self._told[1]


def test_the_view_shows_what_is_measured() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    reading = Reading(power_mw=5480.0, ram_used_bytes=3 << 29, temperature_c=41.5)
    sink = terminal_sink(stream, Measured(reading, Energy(2.0, 40, 5480.0, 274.0, None)))
    sink.write(result(), FRAME)
    sink.close()
    text = stream.getvalue()
    assert "power 5.48 W  274.0 mJ/frame  memory 1.5 GiB  41.5 °C" in text


def test_the_view_leaves_out_what_is_not_measured() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    sink = ViewSink(stream, Measured(Reading(temperature_c=41.5), None))
    sink.write(result(), FRAME)
    sink.close()
    text = stream.getvalue()
    assert "41.5 °C" in text
    assert "power" not in text
    assert "memory" not in text
    assert "None" not in text
