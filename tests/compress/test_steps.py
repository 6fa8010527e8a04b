from __future__ import annotations

from pathlib import Path

import pytest

from edgevit.compress.steps import RunFolder
from edgevit.errors import UserError


def write(text: str) -> object:
    return lambda folder: (folder / "result.txt").write_text(text)


def refuse(folder: Path) -> None:
    raise AssertionError("this step is done and must not run again")


def test_done_steps_are_not_done_again(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", resume=False)
    first.step("one", {"a": 1}, write("1"))
    first.step("two", None, write("2"))
    seconds = first.seconds
    del first
    again = RunFolder(tmp_path / "run", resume=True)
    assert (again.step("one", {"a": 1}, refuse) / "result.txt").read_text() == "1"
    assert again.step("two", None, refuse).name == "02-two"
    assert again.seconds == seconds


def test_a_changed_input_redoes_the_step_and_all_after_it(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, resume=False)
    first.step("one", {"a": 1}, write("old"))
    first.step("two", None, write("old"))
    del first
    again = RunFolder(tmp_path, resume=True)
    assert (again.step("one", {"a": 2}, write("new")) / "result.txt").read_text() == "new"
    assert (again.step("two", None, write("new")) / "result.txt").read_text() == "new"


def test_an_interrupted_step_is_not_taken_for_done_and_keeps_its_parts(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt

    run = RunFolder(tmp_path, resume=False)
    with pytest.raises(KeyboardInterrupt):
        run.step("one", 1, interrupted)
    del run
    assert not (tmp_path / "01-one").exists()
    seen = []
    RunFolder(tmp_path, resume=True).step("one", 1, lambda f: seen.append((f / "part").exists()))
    RunFolder(tmp_path, resume=True).step("one", 2, lambda f: seen.append((f / "part").exists()))
    assert seen == [True, False]


def test_a_folder_in_use_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    with pytest.raises(UserError, match="--resume"):
        RunFolder(tmp_path, resume=False)
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "precious.txt", resume=True)


def test_two_runs_can_not_share_a_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", resume=False)
    with pytest.raises(UserError, match="another run"):
        RunFolder(tmp_path / "run", resume=True)
    del first
    RunFolder(tmp_path / "run", resume=True)


def test_a_damaged_record_means_do_it_again(tmp_path: Path) -> None:
    RunFolder(tmp_path, resume=False).step("one", 1, write("1"))
    (tmp_path / "01-one" / "step.json").write_text("{")
    RunFolder(tmp_path, resume=True).step("one", 1, write("2"))
    assert (tmp_path / "01-one" / "result.txt").read_text() == "2"
