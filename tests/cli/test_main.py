from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Callable

import pytest

import edgevit
from edgevit import cli, errors

HEAVY = ("cv2", "numpy", "onnx", "onnxruntime", "openvino", "rich", "timm", "torch", "torchvision")
# One line on standard error: what every failure is.
ONE_LINE = re.compile(r"edgevit: [^\n]+\n")
Fake = Callable[..., types.ModuleType]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a function in the place of `edgevit bench`."""
    monkeypatch.delenv("EDGEVIT_DEBUG", raising=False)

    def install(run: Callable[[argparse.Namespace], int]) -> types.ModuleType:
        module = types.ModuleType("edgevit.cli.bench")
        module.add_arguments = lambda parser: parser.add_argument("--deep", action="store_true")
        module.run = run
        monkeypatch.setitem(sys.modules, "edgevit.cli.bench", module)
        return module

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def python(program: str, *words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    # A module list instead of a stopwatch: this is what makes the help quick, on any machine.
    found = python(
        "import sys\n"
        "from edgevit.cli import main\n"
        "try: main([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)",
        *words,
    )
    assert (found.returncode, found.stderr) == (0, "[]\n")
    assert found.stdout.startswith(f"usage: {' '.join(['edgevit', *words])} [-h]")


def test_only_the_file_of_the_command_is_imported() -> None:
    found = python(
        "import sys\n"
        "from edgevit.cli import main\n"
        "try: main(['inspect', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.startswith('edgevit')), file=sys.stderr)",
    )
    assert found.stderr == "['edgevit', 'edgevit.cli', 'edgevit.cli.inspect', 'edgevit.errors']\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--help"])
    named = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.MULTILINE)
    assert named == ["compress", "eval", "run", "inspect", "bench"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    version = re.findall(r'^version = "(.+)"$', project.read_text(), re.MULTILINE)[0]
    assert capsys.readouterr().out == f"edgevit {version}\n"
    assert edgevit.__version__ == version


@pytest.mark.parametrize(
    "words", [[], ["evall"], ["eval"], ["inspect"], ["inspect", "a", "b"], ["--nonsense"], [""]]
)
def test_wrong_words_are_a_users_mistake(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(words)
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("usage: edgevit")


def test_the_words_reach_the_command(fake: Fake) -> None:
    seen: list[bool] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args.deep)
        return 0

    fake(run)
    assert cli.main(["bench", "--deep"]) == 0
    assert cli.main(["bench"]) == 0
    assert seen == [True, False]


def test_the_commands_own_status_is_kept(fake: Fake) -> None:
    fake(lambda args: 7)
    assert cli.main(["bench"]) == 7


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.EdgevitError, 1),
        (errors.ParityError, 1),
        (errors.UserError, 2),
        (errors.RecipeError, 2),
        (errors.DataError, 2),
        (errors.ModelError, 2),
        (errors.BundleError, 2),
        (errors.EngineUnavailableError, 2),
        (errors.BudgetExceededError, 3),
    ],
)
def test_an_error_is_one_line_and_a_status(
    kind: type[Exception], status: int, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(raising(kind("x.toml is odd;\n  change it")))
    assert cli.main(["bench"]) == status
    assert capsys.readouterr() == ("", "edgevit: x.toml is odd; change it\n")


@pytest.mark.parametrize(
    "error", [ValueError("no\nsuch thing"), MemoryError(), OSError(28, "full")]
)
def test_a_surprise_is_one_line_that_says_how_to_see_more(
    error: Exception, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(raising(error))
    assert cli.main(["bench"]) == 1
    captured = capsys.readouterr()
    assert ONE_LINE.fullmatch(captured.err)
    assert type(error).__name__ in captured.err and "EDGEVIT_DEBUG=1" in captured.err


@pytest.mark.parametrize("error", [ValueError("no"), errors.BundleError("damaged")])
def test_debug_shows_the_traceback(
    error: Exception, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(raising(error))
    monkeypatch.setenv("EDGEVIT_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["bench"])


def test_ctrl_c_says_that_it_was_interrupted(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(raising(KeyboardInterrupt()))
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr() == ("", "edgevit: interrupted; nothing was kept\n")


def test_ctrl_c_says_what_was_kept(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    module = fake(raising(KeyboardInterrupt()))
    module.interrupted = lambda args: f"deep is {args.deep}"
    assert cli.main(["bench", "--deep"]) == 130
    assert capsys.readouterr() == ("", "edgevit: interrupted; deep is True\n")


def test_compress_says_how_to_go_on() -> None:
    from edgevit.cli import compress

    kept = compress.interrupted(argparse.Namespace(out=Path("runs/a")))
    assert "runs/a" in kept and "--resume" in kept


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    """SIGINT while `compress` waits for a recipe that never comes."""
    recipe = tmp_path / "recipe.toml"
    os.mkfifo(recipe)
    with subprocess.Popen(
        [sys.executable, "-m", "edgevit", "compress", str(recipe), "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # Opening the other end succeeds once the program has opened its own.
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            try:
                pipe = os.open(recipe, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        os.close(pipe)
    assert (process.returncode, out) == (130, "")
    assert ONE_LINE.fullmatch(err) and "interrupted" in err


def test_a_reader_that_has_gone_is_no_error(tiny_bundle: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        found = subprocess.run(
            [sys.executable, "-m", "edgevit", "inspect", str(tiny_bundle)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (found.returncode, found.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny_bundle: Path) -> None:
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "edgevit", "inspect", str(tiny_bundle)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert found.returncode == 1
    assert ONE_LINE.fullmatch(found.stderr) and "No space left" in found.stderr


@pytest.mark.parametrize("command", ["eval", "run", "inspect", "bench", "compress"])
def test_a_missing_file_is_named_without_a_traceback(command: str, tmp_path: Path) -> None:
    more = {"eval": ["--data", "x"], "run": ["--source", "x"], "compress": ["--out", "x"]}
    found = python(
        "import sys; from edgevit.cli import main; sys.exit(main())",
        command,
        "no/such/file",
        *more.get(command, []),
        cwd=tmp_path,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert ONE_LINE.fullmatch(found.stderr) and "no/such/file" in found.stderr
    assert not list(tmp_path.iterdir())
