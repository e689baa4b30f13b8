"""A probe is told when a rank reaches a moment of its step that a fault can be aimed at."""

from typing import Protocol

from spare_megatron.core.phases import Phase


class Probe(Protocol):
    """Called at the moments of `core.phases`. What it does there, dying included, is its own affair."""

    @property
    def phases(self) -> frozenset[Phase]:
        """The moments it wants. Hooks that cost something are installed for these alone."""

    def __call__(self, phase: Phase, /) -> None: ...


class SilentProbe:
    """A probe that asks for nothing and does nothing."""

    phases: frozenset[Phase] = frozenset()

    def __call__(self, phase: Phase, /) -> None:
        """Nothing."""
