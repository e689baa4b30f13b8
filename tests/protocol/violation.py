"""How the simulation says that the protocol is broken."""


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""
