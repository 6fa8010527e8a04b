"""The documents against the code: links, commands and origins go stale without a word otherwise."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from edgevit.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*.md")])
# Made by tools or by runs, not part of what ships.
MADE = {"runs", "dist", "build", "site", "__pycache__"}


def links(text: str) -> List[str]:
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def shell_lines(text: str) -> Iterator[List[str]]:
    """The command lines of ``sh`` code blocks, without comments, continued lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


def edgevit_calls(text: str) -> List[Tuple[str, Tuple[str, ...]]]:
    """Sub-command and options of each edgevit call, in code blocks and in code spans."""
    spans = [shlex.split(span) for span in re.findall(r"`(edgevit [^`\n]+)`", text)]
    calls = []
    for words in [*shell_lines(text), *spans]:
        if Path(words[0]).name == "edgevit":
            options = re.findall(r"--[a-z][a-z-]*", " ".join(words[1:]))
            calls.append((words[1], tuple(options)))
    return calls


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in links(document.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", link):
            assert (document.parent / link.split("#")[0]).exists(), f"{document.name}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_their_options_exist(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, options in edgevit_calls(document.read_text(encoding="utf-8")):
        if command in ("COMMAND", "--help", "--version"):
            continue
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        help_text = capsys.readouterr().out
        assert ended.value.code == 0, f"{document.name}: edgevit {command}"
        for option in options:
            assert re.search(rf"{option}\b", help_text), f"{document.name}: {command} {option}"


def test_readme_names_every_command() -> None:
    commands = {command for command, _ in edgevit_calls((ROOT / "README.md").read_text())}
    assert {"compress", "run", "eval", "bench", "inspect"} <= commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_scripts_named_in_code_blocks_can_be_run(document: Path) -> None:
    for words in shell_lines(document.read_text(encoding="utf-8")):
        if words[0].startswith("scripts/"):
            assert os.access(ROOT / words[0], os.X_OK), f"{document.name}: {words[0]}"


def test_notice_names_every_binary_that_ships() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    binaries = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name not in MADE]
        for path in (Path(folder, name) for name in files if name[0] != "."):
            with path.open("rb") as stream:
                if b"\0" in stream.read(8192):
                    binaries.append(path.relative_to(ROOT))
    assert len(binaries) > 500, "the walk misses what ships"
    for path in binaries:
        named = [str(path), *(f"{folder}/" for folder in path.parents if len(folder.parts) > 1)]
        assert any(name in notice for name in named), f"NOTICE does not say where {path} is from"
