"""Audited microbatches of one process, whose digests stand for the parameters they are computed with, and who is right.

A process may compute wrongly: once, always to the same wrong values, or to other ones each time.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from random import Random

from spare_megatron.core.audits.audits import MicrobatchDigest
from spare_megatron.core.log.entries import Entry, Retry
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.plans import Microbatch, StepPlan
from tests.protocol.suspects import CountedLosses
from tests.protocol.violation import Violation

WAYS = ("once", "alike", "anew")


def digest_of(params: str, step: int, microbatch: Microbatch, error: str = "") -> int:
    return int(sha256(repr((params, step, tuple(microbatch), error)).encode()).hexdigest()[:15], 16)


class AuditDigests:
    """The digests that a process votes with; `name` is that of the process."""

    def __init__(self, name: str, suspect_every: int) -> None:
        self._name = name
        self._way = ""
        self.is_lasting = False
        """Whether all that it has computed in the step is wrong."""
        self.losses = CountedLosses(suspect_every)
        self._errors: dict[Microbatch, str] = {}  # of what it has computed beside its work
        self._num_wrong = self._num_before = 0
        self._digests: dict[Microbatch, int] = {}

    def spoil(self, random: Random) -> None:
        """It computes wrongly from now on, or the next time."""
        self._way = random.choice(WAYS)

    def drift(self, random: Random) -> None:
        """It computes wrongly from now on."""
        self._way = self._way or random.choice(WAYS[1:])

    @property
    def is_wrong(self) -> bool:
        """Whether it has computed an audited microbatch wrongly."""
        return self._num_wrong > 0

    @property
    def finds_itself_wrong(self) -> bool:
        """Whether checks of its own, which see everything, have found something since the step began."""
        return self._num_wrong > self._num_before

    def begin(self) -> None:
        self._num_before = self._num_wrong
        self._digests.clear()
        self._errors.clear()
        self.is_lasting = self._way in WAYS[1:]
        self.losses.begin()

    def counted(self, work: Iterable[Microbatch], plan: StepPlan, group: int) -> list[Microbatch]:
        """What comes into the sums when it computes its part of a plan."""
        return list(work)

    def count(self, params: str, step: int, work: Iterable[Microbatch]) -> None:
        """It computes its own microbatches, once, those that others audit included."""
        for one in work:
            self.losses.count(params, step, one, self._errors[one] if one in self._errors else self._next_error())

    def compute(self, params: str, step: int, microbatch: Microbatch) -> None:
        self._errors[microbatch] = error = self._next_error()
        self._digests[microbatch] = digest_of(params, step, microbatch, error)

    def compute_again(self, params: str, step: int, microbatch: Microbatch, *, is_suspect: bool) -> None:
        self.compute(params, step, microbatch)
        if is_suspect:
            self.losses.compute_again(params, step, microbatch, self._errors[microbatch])

    def _next_error(self) -> str:
        if not self._way:
            return ""
        self._num_wrong += 1
        error = f"{self._name} {self._num_wrong if self._way == 'anew' else self._way}"
        if self._way == "once":
            self._way = ""
        return error

    def digests(self) -> tuple[MicrobatchDigest, ...]:
        return tuple(MicrobatchDigest(*microbatch, digest) for microbatch, digest in sorted(self._digests.items()))


class AuditObserver:
    """Knows which processes have computed wrongly."""

    def __init__(self, hosts: list[set[int]] | None) -> None:
        self._hosts = hosts
        self.wrong: set[str] = set()

    def voted(self, process: str, step: int, params: str | None, vote: Vote, *, is_wrong: bool) -> None:
        """A process votes; `params` are the right ones, None if it has others itself."""
        if is_wrong:
            self.wrong.add(process)
        for item in () if is_wrong or params is None else vote.audits:
            if item.digest != digest_of(params, step, item.microbatch):
                raise Violation(f"{process} votes with a digest of {item.microbatch} that is none of step {step}")

    def committed(self, writer: str, votes: Mapping[tuple[int, int], Vote]) -> None:
        if differ(votes.values()):
            raise Violation(f"{writer} commits though members have computed microbatches differently")

    def outvoted(self, process: str, writer: str, corrupted: set[str]) -> None:
        if process not in self.wrong | corrupted:
            raise Violation(f"{writer} fences {process}, which computes right")

    def asked(self, writer: str, entry: Retry, members: set[int]) -> None:
        for dispute in entry.disputes:
            able = members if self._hosts is None else members & self._hosts[dispute.microbatch.shard]
            if not set(dispute.asked) <= able:
                raise Violation(f"{writer} asks {dispute.asked} about a microbatch that only {able} can compute")

    def halted(self, writer: str, entries: Iterable[Entry], members: set[tuple[int, int]]) -> None:
        """It cannot be decided which group is right: no two members that can compute a disputed microbatch are."""
        *_, last = (entry for entry in entries if isinstance(entry, Retry))
        right = {group for group, number in members if f"{group}.{number}" not in self.wrong}
        for dispute in last.disputes:
            able = right if self._hosts is None else right & self._hosts[dispute.microbatch.shard]
            if len(able) < 2:
                return
        raise Violation(f"{writer} halts the run over {last.disputes}, about which right groups agree")


def differ(votes: Iterable[Vote]) -> bool:
    """Whether two of them have other digests of one microbatch."""
    digests = {(item.microbatch, item.digest) for vote in votes for item in vote.audits}
    return len(digests) > len({microbatch for microbatch, _ in digests})


class CountsAudits(AuditDigests):
    """Adds to its sums what it computes to compare."""

    def counted(self, work: Iterable[Microbatch], plan: StepPlan, group: int) -> list[Microbatch]:
        return [*work, *(audit.microbatch for audit in plan.audits if audit.auditor == group)]


class VotesWithOldDigests(AuditDigests):
    """Keeps the digest of a microbatch at the same place that it has computed in an earlier attempt or step."""

    def __init__(self, name: str, suspect_every: int) -> None:
        super().__init__(name, suspect_every)
        self._kept: dict[Microbatch, int] = {}

    def compute(self, params: str, step: int, microbatch: Microbatch) -> None:
        super().compute(params, step, microbatch)
        self._digests[microbatch] = self._kept.setdefault(microbatch, self._digests[microbatch])
