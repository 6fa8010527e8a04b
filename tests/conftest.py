from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tiny_bundle import write_tiny_bundle

# A shell starts background jobs with SIGINT ignored, and programs that the tests start and interrupt
# would inherit that: a handler, whichever, is reset to the default in them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose right answers are known by construction."""
    return write_tiny_bundle(tmp_path_factory.mktemp("tiny") / "tiny.evb")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The research data sets, which a user does not have."""
    if not SHARED.is_dir():
        pytest.skip(f"the research data sets are not at {SHARED}")
    return SHARED
