"""What a source of figures is."""

from __future__ import annotations

from typing import Protocol

from edgevit.runtime.meter.reading import Reading


class SourceUnavailableError(Exception):
    """This machine lacks the source, or it has died; the message is the reason, for people."""


class Source(Protocol):
    """Gives the figures it knows, the others None."""

    name: str

    def read(self) -> Reading:
        """The newest figures. Raises ``SourceUnavailableError`` once it will give none any more."""

    def close(self) -> None: ...
