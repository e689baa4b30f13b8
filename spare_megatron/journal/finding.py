"""What a rule finds in a journal."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["invalid", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that keeps a journal from being valid."""

    severity: Severity
    reason: str
