"""Entries of the outer log, votes and leases of sites, and their encoding.

Entry i is written once, by compare-and-set; `core.outer.rounds` folds the log. Votes are written once, too.
"""

from dataclasses import dataclass
from typing import NamedTuple, NewType, get_args

from spare_megatron.formats.codec import decode, decode_head, encode, set_fields

SiteId = NewType("SiteId", int)
"""Number of a site, 0 to sites.num_sites - 1."""

VERSION = 1
"""Of entries, votes and leases; rises with every change of their fields or meaning."""


class Revision(NamedTuple):
    """An outer state: parameters at the start of a round, and momentum."""

    round: int
    """The round whose commit has made it; 0 for the state in which training begins."""
    digest: str


class Contribution(NamedTuple):
    """What a site has arrived with in a round."""

    site: SiteId
    incarnation: int
    weight: int
    """Microbatches that it has computed since its last outer step."""
    step: int
    """Committed steps of its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """A site has computed enough steps: all sites that hold `base` arrive at their next commit."""

    round: int
    site: SiteId
    base: Revision
    """The state that the round continues; later ones are void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRound:
    """These sites exchange their differences, and vote with the digest of the state that results."""

    round: int
    sites: tuple[Contribution, ...]
    """In order of their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutSite:
    """The site takes no further part in the round: the others compute its result anew from what they have fetched."""

    round: int
    site: SiteId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRound:
    """All sites that are left have computed the same state, and continue with it."""

    round: int
    sites: tuple[SiteId, ...]
    digest: str


OuterEntry = OpenRound | CloseRound | WithoutSite | CommitRound
_KINDS: dict[str, type[OuterEntry]] = {kind.__name__.lower(): kind for kind in get_args(OuterEntry)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A site's vote on an open round: it stands at a commit and contributes what it has computed."""

    site: SiteId
    incarnation: int
    round: int
    weight: int
    """As in `Contribution`; at least 1."""
    step: int
    revision: Revision
    """The state that its differences refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A site's vote on a closed round: it has computed the result."""

    site: SiteId
    incarnation: int
    round: int
    attempt: int
    """How many sites the round had lost when it was computed."""
    digest: str
    """Of the parameters and the momentum that result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a site writes again and again to show that it lives."""

    site: SiteId
    incarnation: int
    """Rises with each start of the site's run, and each restart of it from an earlier state."""
    beats: int
    """Moves with each write."""
    progress: int = 0
    """Moves while the site fetches differences or computes a result."""
    head: int = 0
    """Entries of the outer log that it has acted on and still holds `revision`."""
    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    entry: str = ""
    version: int = 0


def encode_entry(entry: OuterEntry) -> str:
    """One line of JSON, equal for equal entries.

    >>> encode_entry(WithoutSite(round=3, site=SiteId(1)))
    '{"entry":"withoutsite","version":1,"round":3,"site":1}'
    """
    return encode({"entry": type(entry).__name__.lower(), "version": VERSION} | set_fields(entry))


def decode_entry(text: str) -> OuterEntry:
    """The inverse of `encode_entry`. Raises ValueError for an entry of another version, and for an unknown kind."""
    head = decode_head(text, _Head)
    if head.version != VERSION or head.entry not in _KINDS:
        raise ValueError(
            f"outer log: entry {head.entry!r} of version {head.version}; this program reads version {VERSION}: all "
            f"sites must run the same version of spare_megatron"
        )
    return decode(text, _KINDS[head.entry], beside=("entry", "version"))
