"""The settings of sites, which join what they have computed by rare outer steps."""

from dataclasses import dataclass
from typing import Literal

from spare_megatron.config.limits import NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesConfig:
    """Sites that train one model together over links that are too slow for sums in every step."""

    endpoints: tuple[str, ...] = ()
    """Outer store, the same for all sites: client URLs of etcd members, for which the certificates and credentials of
    `[control]` count, or one tcp://ADDRESS:PORT, which the driver of site 0 serves; no sites if empty."""
    num_sites: PositiveInt = 2
    """Sites of the training: each reads every num_sites-th sample of the order."""
    site: NonNegativeInt = 0
    """Number of this site, from 0; `spare train --site` sets it."""
    every_steps: PositiveInt = 100
    """Steps between outer steps (H)."""
    learning_rate: PositiveFloat = 0.7
    """Learning rate of the outer step, which is Nesterov's; 1 without momentum takes the mean of the sites."""
    momentum: ShareBelowOne = 0.9
    """Momentum of the outer step."""
    bits: Literal[32, 8, 4] = 32
    """Bits of each number that sites exchange; 8 and 4 are scaled in blocks of 256 numbers."""
    wait_s: PositiveFloat = 30.0
    """Longest wait for a site that does not arrive, and for one that makes no progress in the exchange."""

    @property
    def is_used(self) -> bool:
        return bool(self.endpoints)

    @property
    def rule(self) -> str:
        """The settings that decide the result of a round."""
        return f"sites.bits={self.bits}, sites.learning_rate={self.learning_rate}, sites.momentum={self.momentum}"

    def read_of_order(self, number: int) -> int:
        """Samples of the order up to the last one of the first `number` that this site reads.

        >>> SitesConfig(endpoints=("tcp://127.0.0.1:4000",), num_sites=3, site=1).read_of_order(2)
        5
        """
        if not self.is_used or not number:
            return number
        return (number - 1) * self.num_sites + self.site + 1
