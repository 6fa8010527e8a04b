"""The exit policy: whether a frame may leave the cascade at an exit. It decides, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Tuple

from edgevit.errors import BundleError

# A softmax confidence never exceeds 1, so this threshold is never reached.
NEVER = 2.0


@dataclass(frozen=True)
class ExitPolicy:
    """Confidence thresholds, one for each early exit, first exit first.

    A frame leaves at the first exit whose confidence is at least its threshold; a frame that is
    sure nowhere runs to the final head, which needs no threshold.

    >>> policy = ExitPolicy((0.9, 0.8))
    >>> policy.leaves_at(0, 0.95), policy.leaves_at(1, 0.5), policy.leaves_at(2, 0.1)
    (True, False, True)
    """

    thresholds: Tuple[float, ...]

    def leaves_at(self, stage: int, confidence: float) -> bool:
        """Whether a frame with ``confidence`` (0 to 1) at the exit of ``stage`` (from 0) stops there."""
        return stage >= len(self.thresholds) or confidence >= self.thresholds[stage]

    def to_json(self) -> Dict[str, Any]:
        return {"score": "max_softmax", "thresholds": list(self.thresholds)}

    @classmethod
    def from_json(cls, value: Any, early_exits: int) -> ExitPolicy:
        """Read a policy for ``early_exits`` exits; raises :class:`BundleError` for anything else."""
        if not isinstance(value, dict) or value.get("score") != "max_softmax":
            raise BundleError(
                "manifest: 'policy.score' must be 'max_softmax'; make the bundle again"
            )
        thresholds = value.get("thresholds")
        if (
            not isinstance(thresholds, list)
            or len(thresholds) != early_exits
            or not all(
                isinstance(t, (int, float)) and not isinstance(t, bool) and 0 <= t <= NEVER
                for t in thresholds
            )
        ):
            raise BundleError(
                f"manifest: 'policy.thresholds' must be {early_exits} numbers from 0 to {NEVER:g} (never), "
                "one for each early exit; make the bundle again"
            )
        return cls(tuple(float(t) for t in thresholds))
