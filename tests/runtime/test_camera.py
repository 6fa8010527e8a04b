from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Generator, Iterable

import cv2
import numpy as np
import pytest

from edgevit.errors import DataError
from edgevit.runtime import camera as camera_module
from edgevit.runtime.camera import Camera, Picture, open_camera
from tests.videos import number_of, numbered, write_video


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterable[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class FakeDevice:
    """A device that delivers a frame every ``period_s``, then what ``end`` says."""

    def __init__(self, period_s: float = 0.002, frames: int = 10**9, end: str = "block") -> None:
        self.period_s, self.frames, self.end = period_s, frames, end
        self.delivered = 0
        self.released = 0
        self.unblock = threading.Event()

    def read(self) -> tuple[bool, np.ndarray | None]:
        if self.delivered == self.frames:
            if self.end == "block":
                self.unblock.wait()
            return False, None
        time.sleep(self.period_s)
        self.delivered += 1
        return True, np.full((4, 4, 3), self.delivered % 256, np.uint8)

    def release(self) -> None:
        self.released += 1


def live_camera(device: FakeDevice, stall_s: float = 5.0) -> Camera:
    pictures = camera_module._device_pictures(device, "/dev/video7")
    return Camera("/dev/video7", pictures, live=True, stall_s=stall_s)


@pytest.mark.parametrize("name", ["clip.avi", "clip.mp4", "clip.mkv"])
def test_a_video_gives_every_frame_in_order_with_its_time(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, numbered(30), fps=10)
    with open_camera(path) as camera:
        frames = list(camera)
    assert not camera.live
    assert [number_of(frame.image_bgr) for frame in frames] == list(range(30))
    assert [frame.index for frame in frames] == list(range(30))
    assert [frame.time_s for frame in frames] == pytest.approx([i / 10 for i in range(30)])


def test_a_slow_consumer_of_a_video_misses_nothing(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.avi", numbered(12))
    seen = []
    with open_camera(path) as camera:
        for frame in camera:
            time.sleep(0.02)
            seen.append(number_of(frame.image_bgr))
    assert seen == list(range(12))


def test_a_video_is_not_decoded_far_ahead(tmp_path: Path) -> None:
    taken = []

    def pictures() -> Generator[Picture, None, None]:
        for number in range(100):
            taken.append(number)
            yield np.zeros((2, 2, 3), np.uint8), 0.0

    with Camera("pictures", pictures(), live=False) as camera:
        next(camera)
        time.sleep(0.3)
        assert len(taken) < 10


@pytest.mark.parametrize("name", ["clothing_pan", "flowers_pan"])
def test_the_shared_clips_are_complete(shared: Path, name: str) -> None:
    with open_camera(shared / "data/video" / f"{name}.mp4") as camera:
        shapes = [frame.image_bgr.shape for frame in camera]
    facts = json.loads((shared / "data/video" / f"{name}.json").read_text())
    assert shapes == [(480, 640, 3)] * facts["frames"]


def truncate(source: Path, target: Path, share: float) -> Path:
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * share)])
    return target


@pytest.mark.parametrize("share", [0.41, 0.5, 0.52, 0.57, 0.9])
@pytest.mark.parametrize("container", ["avi", "mkv"])
def test_a_video_cut_mid_frame_ends_after_its_last_whole_frame(
    tmp_path: Path, share: float, container: str, caplog: pytest.LogCaptureFixture
) -> None:
    noise = [
        np.random.default_rng(i).integers(0, 255, (48, 64, 3)).astype(np.uint8) for i in range(30)
    ]
    whole = write_video(tmp_path / f"whole.{container}", noise)
    with open_camera(whole) as camera:
        expected = [frame.image_bgr for frame in camera]
    assert len(expected) == 30
    assert not caplog.records

    cut = truncate(whole, tmp_path / f"cut.{container}", share)
    with open_camera(cut) as camera, caplog.at_level(logging.WARNING):
        frames = [frame.image_bgr for frame in camera]
    # The pictures are equally large, so that their number follows from the file's size.
    assert 30 * share - 2.5 <= len(frames) <= 30 * share + 0.5
    for frame, wanted in zip(frames, expected):
        np.testing.assert_array_equal(frame, wanted)  # the last one too: nothing half decoded
    assert len(caplog.records) == 1
    assert f"{cut} ends after {len(frames)} of the 30 frames" in caplog.text


def test_ffmpeg_options_are_left_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "clip.avi", numbered(2))
    monkeypatch.delenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", raising=False)
    open_camera(path).close()
    assert "OPENCV_FFMPEG_CAPTURE_OPTIONS" not in os.environ
    monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", "threads;1")
    open_camera(path).close()
    assert os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] == "threads;1"


def test_an_mp4_cut_before_its_index_is_refused(tmp_path: Path) -> None:
    cut = truncate(
        write_video(tmp_path / "whole.mp4", numbered(30)), tmp_path / "cut.mp4", share=0.6
    )
    with pytest.raises(DataError, match=r"cut\.mp4 is not a video .* or it was cut short"):
        open_camera(cut)


@pytest.mark.parametrize("size", [(48, 64), (1, 1), (33, 17), (7, 300)])
def test_pictures_of_any_size_and_kind(tmp_path: Path, size: tuple[int, int]) -> None:
    grey = np.full(size, 77, np.uint8)
    cv2.imwrite(str(tmp_path / "a_grey.png"), grey)
    cv2.imwrite(str(tmp_path / "b_16bit.png"), grey.astype(np.uint16) * 257)
    cv2.imwrite(str(tmp_path / "c_alpha.png"), np.dstack([grey] * 4))
    with open_camera(tmp_path) as camera:
        frames = list(camera)
    assert [frame.index for frame in frames] == [0, 1, 2]
    for frame in frames:
        np.testing.assert_array_equal(frame.image_bgr, np.dstack([grey] * 3))
        assert frame.time_s == 0


@pytest.mark.parametrize("size", [(50, 66), (34, 18)])
def test_a_greyscale_video_of_an_odd_size(tmp_path: Path, size: tuple[int, int]) -> None:
    height, width = size
    path = tmp_path / "grey.avi"
    fourcc = cv2.VideoWriter.fourcc(*"MJPG")
    writer = cv2.VideoWriter(str(path), fourcc, 10, (width, height), isColor=False)
    for _ in range(3):
        writer.write(np.full(size, 120, np.uint8))
    writer.release()
    with open_camera(path) as camera:
        frames = list(camera)
    assert [frame.image_bgr.shape for frame in frames] == [(height, width, 3)] * 3
    assert abs(float(frames[0].image_bgr.mean()) - 120) < 4


def test_one_image_is_one_frame(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "one.PNG"), np.full((5, 6, 3), (1, 2, 3), np.uint8))
    with open_camera(tmp_path / "one.PNG") as camera:
        (frame,) = camera
    np.testing.assert_array_equal(frame.image_bgr, np.full((5, 6, 3), (1, 2, 3), np.uint8))


def test_a_folder_of_class_folders_comes_in_name_order(tmp_path: Path) -> None:
    names = ["b/1.png", "a/2.png", "a/10.png", "c.png", ".hidden/0.png", "a/.0.png", "a/notes.txt"]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        encoded = cv2.imencode(".png", np.full((2, 2, 3), number, np.uint8))[1]
        (tmp_path / name).write_bytes(encoded.tobytes())
    with open_camera(tmp_path) as camera:
        numbers = [int(frame.image_bgr[0, 0, 0]) for frame in camera]
    # a/10, a/2, b/1, c; neither hidden files nor files that are no images
    assert numbers == [2, 1, 0, 3]


def test_a_damaged_image_is_named_after_the_ones_before_it(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "4.png"):
        cv2.imwrite(str(tmp_path / name), np.zeros((2, 2, 3), np.uint8))
    (tmp_path / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    seen = []
    with pytest.raises(DataError, match=r"3\.png"), open_camera(tmp_path) as camera:
        for frame in camera:
            seen.append(frame.index)
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.mp4", "'missing.mp4' does not exist"),
        ("", "'' does not exist"),
        ("text.mp4", "text.mp4 is not a video"),
        ("empty.avi", "empty.avi is not a video"),
        ("folder", "folder holds no images"),
        ("gopher://camera", "gopher://camera is not a known kind of source"),
        ("97", "there is no camera /dev/video97"),
        ("v4l2:///dev/video98", "there is no camera /dev/video98"),
        ("/dev/video99", "there is no camera /dev/video99"),
    ],
)
def test_what_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "text.mp4").write_text("not a video\n" * 100)
    (tmp_path / "empty.avi").touch()
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    (tmp_path / "folder" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        open_camera(source)


def test_a_device_that_is_no_camera_says_what_to_check(tmp_path: Path) -> None:
    device = tmp_path / "video0"
    device.touch()
    with pytest.raises(DataError, match="can't be opened as a camera; check that no other program"):
        camera_module._open_device(str(device))


def test_a_device_without_permission_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "video0"
    device.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may open anything
    with pytest.raises(DataError, match="usermod -aG video"):
        camera_module._open_device(str(device))


def test_a_slow_consumer_of_a_live_camera_gets_the_latest_frame() -> None:
    device = FakeDevice(period_s=0.002)
    with live_camera(device) as camera:
        first = next(camera)
        time.sleep(0.3)  # some hundred frames long
        delivered = device.delivered
        second = next(camera)
        # Index i is the device's frame i + 1; one may be on its way.
        assert second.index + 1 >= delivered - 1
        assert second.index > first.index + 10
        assert second.image_bgr[0, 0, 0] == (second.index + 1) % 256
        assert second.age_ms < 150
        assert second.time_s > first.time_s
    assert device.released == 1


def test_a_fast_consumer_of_a_live_camera_gets_no_frame_twice() -> None:
    with live_camera(FakeDevice(period_s=0.005)) as camera:
        indices = [next(camera).index for _ in range(20)]
    assert indices == sorted(set(indices))


def test_the_age_of_a_live_frame_grows_from_its_capture() -> None:
    with live_camera(FakeDevice()) as camera:
        frame = next(camera)
        age_ms = frame.age_ms
        time.sleep(0.1)
        assert 99 <= frame.age_ms - age_ms < 1000
        assert 0 <= age_ms < 1000


def test_a_recorded_frame_does_not_age_while_it_waits(tmp_path: Path) -> None:
    with open_camera(write_video(tmp_path / "clip.avi", numbered(3))) as camera:
        time.sleep(1)
        assert next(camera).age_ms < 500


def test_a_live_camera_that_ends_is_an_error_and_released() -> None:
    device = FakeDevice(frames=0, end="fail")
    with pytest.raises(DataError, match="video7 stopped delivering"), live_camera(device) as camera:
        next(camera)
    assert device.released == 1


def test_a_live_camera_that_hangs_is_an_error_and_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(camera_module, "_JOIN_S", 0.05)
    device = FakeDevice(frames=1)
    camera = live_camera(device, stall_s=0.2)
    with pytest.raises(DataError, match=r"delivered no frame for 0\.2 s"), camera:
        next(camera)
        next(camera)
    assert "does not answer" in caplog.text
    device.unblock.set()  # the thread then releases the device by itself
    camera._thread.join(5)
    assert device.released == 1


def test_it_is_released_when_the_consumer_raises() -> None:
    device = FakeDevice()
    with pytest.raises(ZeroDivisionError), live_camera(device) as camera:
        for _ in camera:
            raise ZeroDivisionError
    assert device.released == 1


def test_a_video_is_released_when_it_is_left_early(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.avi", numbered(30))
    opened = Path("/proc/self/fd")
    opened_before = len(list(opened.iterdir()))
    for _ in range(5):
        with open_camera(path) as camera:
            next(camera)
    assert len(list(opened.iterdir())) == opened_before
    assert list(camera) == []


def test_stop_ends_the_iteration_with_frames_left(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.avi", numbered(30))
    seen = []
    with open_camera(path) as camera:
        for frame in camera:
            seen.append(frame.index)
            if frame.index == 2:
                camera.stop()
    assert seen == [0, 1, 2]


def test_stop_wakes_a_consumer_that_waits() -> None:
    device = FakeDevice(frames=0)
    with live_camera(device) as camera:
        timer = threading.Timer(0.1, camera.stop)
        timer.start()
        assert list(camera) == []
        timer.join()
        device.unblock.set()
    assert device.released == 1
