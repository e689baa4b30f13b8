"""What a rule of the check reports."""

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["invalid", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why a journal is not valid.

    Attributes:
        severity: `invalid` contradicts the invariant; `unknown` prevents its proof.
        place: Sort key among the findings of a rule; equal places keep the order in which they were found.
    """

    severity: Severity
    reason: str
    place: tuple[Any, ...] = ()
