"""What outer steps between sites cost, in closed form.

Symbols: S = num_sites, P = parameters, b = bits of a number, H = every_steps, T = seconds of a step, R = bits per s
from a site to the others. A site sends its differences to each of the others: (S - 1) P b / 8 bytes, and for 8 and 4
bits 4 bytes more for each block of 256 numbers. A site that is lost takes with it what it has computed since its last
round, H / 2 steps on average, of which the training has 1 / S.
"""

from dataclasses import dataclass

_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesCost:
    num_sites: int
    num_parameters: int
    every_steps: int
    step_s: float
    bits_per_s: float
    wait_s: float
    """The others wait for a lost site once, at most so long in a round, and twice."""

    def sent_bytes(self, bits: int) -> float:
        """From one site to all others, in a round.

        >>> two = dict(num_sites=2, every_steps=100, step_s=10.0, bits_per_s=1e10, wait_s=30.0)
        >>> SitesCost(num_parameters=7 * 10**9, **two).sent_bytes(32) / 1e9
        28.0
        """
        scale_bits = 0 if bits == 32 else 8 * 4 / _BLOCK
        return (self.num_sites - 1) * self.num_parameters * (bits + scale_bits) / 8

    def exchange_s(self, bits: int) -> float:
        return 8 * self.sent_bytes(bits) / self.bits_per_s

    def share(self, bits: int) -> float:
        """Of the time of a round, what its exchange takes."""
        exchange_s = self.exchange_s(bits)
        return exchange_s / (self.every_steps * self.step_s + exchange_s)

    @property
    def lost_s(self) -> float:
        """Time of the whole training whose samples a lost site takes with it."""
        return self.every_steps * self.step_s / 2 / self.num_sites
