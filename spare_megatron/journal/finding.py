"""What a rule finds in a journal."""

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["invalid", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that keeps a journal from being valid.

    Attributes:
        severity: Whether it contradicts the invariant, or keeps it from being proven.
        reason: What it is.
        place: Its place among the findings of its rule. Those of a place are told in the order they were found in.
    """

    severity: Severity
    reason: str
    place: tuple[Any, ...] = ()
