"""Which steps of which site are in the parameters that sites have joined, by the logs of their runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from spare_megatron.core.log.entries import Restart, Synced, Undo, entry_of
from spare_megatron.core.outer.entries import Revision
from spare_megatron.journal.fold import Finding, Fold, invalid, unknown
from spare_megatron.journal.records import RoundRecord

Steps = tuple[int, int]
"""First step, and the one after the last."""


_START = Revision(0, "")


class Contributed(NamedTuple):
    """What a site has contributed to a round, which continues another one."""

    base: Revision
    sites: tuple[int, ...]
    steps: Steps


@dataclass(slots=True)
class SiteHistory:
    """Rounds of a site over its runs, in their order. A run that continues another one goes back to its checkpoint."""

    site: int
    first_step: int
    microbatches_before: Callable[[int], int]
    """A step."""
    step: int = 0
    """Committed steps in the end."""
    contributed: dict[Revision, Contributed] = field(default_factory=dict)
    marks: list[tuple[int, Revision]] = field(default_factory=list)
    """Steps after which the site has taken a state, and that state."""
    missed: list[tuple[Revision, Steps]] = field(default_factory=list)
    """What it has arrived with where it did not await the end: the state that it had, and the steps since."""
    weights: dict[Revision, Mapping[str, int]] = field(default_factory=dict)
    """Of the rounds of the site: microbatches by site."""

    def add(self, fold: Fold, records: Iterable[RoundRecord]) -> None:
        """Adds the log of the site's next run, and its records of rounds."""
        self.weights |= {Revision(one.round, one.digest): one.weights for one in records if one.weights}
        self._go_back(fold.run.first_step)
        for index in sorted(fold.entries):
            match entry_of(fold.entries[index]):
                case Restart(step=step) | Undo(step=step):
                    self._go_back(step)
                case Synced(round=number, sites=sites, digest=digest, step=step):
                    revision, (since, base) = Revision(number, digest), self.marks[-1]
                    if not number:
                        self.missed.append((base, (since, step)))
                        continue
                    if self.site in sites:
                        self.contributed[revision] = Contributed(base, sites, (since, step))
                    self.marks.append((step, revision))
        self.step = fold.step

    def steps_in(self, revision: Revision, base: Revision, weight: int | None) -> Steps | None:
        """The steps of the site in a round that has counted so many of its microbatches; None if they are unknown."""
        if revision in self.contributed:
            return self.contributed[revision].steps
        # Cut off after it had voted, it went on; the others have committed the round.
        spans = [steps for had, steps in self.missed if had == base and self._work(steps) == weight]
        return spans[0] if spans else None

    def _work(self, steps: Steps) -> int:
        return self.microbatches_before(steps[1]) - self.microbatches_before(steps[0])

    def wrong_weight(self, revision: Revision) -> bool:
        """Whether the round has counted another number of microbatches than the steps of the site have."""
        weight = self.weights.get(revision, {}).get(str(self.site))
        one = self.contributed.get(revision)
        return weight is not None and one is not None and self._work(one.steps) != weight

    def _go_back(self, step: int) -> None:
        self.marks = [mark for mark in self.marks if mark[0] <= step] or [(step, _START)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSteps:
    """Steps of a site: those that are in the joined parameters, and those that are not."""

    site: int
    joined: list[Steps]
    """Ascending; those of a step that was computed twice may overlap."""
    left_out: list[Steps]
    """Computed, and not in them."""
    since: Steps | None
    """Those that the site has computed since it took the joined parameters; None if it has not taken them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSites:
    newest: Revision
    rounds: list[int]
    """That have led to it, ascending."""
    sites: list[SiteSteps]
    findings: list[Finding]


def join_sites(histories: Sequence[SiteHistory]) -> JoinedSites:
    """What the runs of sites, one history each, have together."""
    newest = max(history.marks[-1][1] for history in histories)
    contributed = {revision: one for history in histories for revision, one in history.contributed.items()}
    chain: list[Revision] = []
    revision = newest
    while revision.round:
        chain.append(revision)
        base = contributed[revision].base if revision in contributed else _START
        revision = base if base.round < revision.round else _START
    weights = {revision: one for history in histories for revision, one in history.weights.items()}
    joined: dict[int, list[Steps]] = {history.site: [] for history in histories}
    findings: list[Finding] = []
    for revision in chain:
        findings += _contradictions(revision, histories)
        if revision not in contributed:
            findings.append(unknown(f"round {revision.round}: no run that took part in it is given"))
            continue
        for site in contributed[revision].sites:
            weight = weights.get(revision, {}).get(str(site))
            own = [history for history in histories if history.site == site]
            steps = own[0].steps_in(revision, contributed[revision].base, weight) if own else None
            if steps is not None:
                joined[site].append(steps)
            else:
                findings.append(unknown(f"round {revision.round}: no run of site {site} says what it contributed"))
    for site, spans in joined.items():
        spans.sort()
        twice = [(later[0], before[1]) for before, later in pairwise(spans) if later[0] < before[1]]
        what = f"site {site} has computed steps again that are in the parameters, from"
        findings += [Finding("remark", f"{what} {first} to {end - 1}") for first, end in twice]
    return JoinedSites(
        newest=newest,
        rounds=sorted(revision.round for revision in chain),
        sites=[_site_steps(one, newest, joined[one.site]) for one in sorted(histories, key=lambda one: one.site)],
        findings=findings,
    )


def _contradictions(revision: Revision, histories: Sequence[SiteHistory]) -> Iterator[Finding]:
    what = f"round {revision.round}"
    contributed = [one.contributed[revision] for one in histories if revision in one.contributed]
    if len({(one.base, one.sites) for one in contributed}) > 1:
        yield invalid(f"{what}: its sites disagree about who took part, or what it continues")
    for history in histories:
        if history.wrong_weight(revision):
            yield invalid(
                f"{what}: it counts another number of microbatches than the steps of site {history.site} have"
            )


def _site_steps(history: SiteHistory, newest: Revision, joined: list[Steps]) -> SiteSteps:
    at, held = history.marks[-1]
    since = (at, history.step) if held == newest else None
    left_out, reached = [], history.first_step
    for first, end in [*joined, since or (history.step, history.step)]:
        if first > reached:
            left_out.append((reached, first))
        reached = max(reached, end)
    return SiteSteps(site=history.site, joined=joined, left_out=left_out, since=since)


def without_gaps(spans: Iterable[Steps]) -> list[Steps]:
    """Ascending spans, those joined that touch or overlap; without empty ones.

    >>> without_gaps([(0, 3), (3, 5), (5, 5), (7, 9)])
    [(0, 5), (7, 9)]
    """
    found: list[Steps] = []
    for first, end in spans:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif first < end:
            found.append((first, end))
    return found
