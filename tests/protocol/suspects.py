"""Suspect microbatches: digests that stand for the losses that a process has counted, and when they may be committed.

A loss is suspect where the data are unusual, on all groups alike, or where a process computes wrongly.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import sha256

from spare_megatron.core.audits.audits import Dispute, MicrobatchDigest
from spare_megatron.core.log.votes import Vote
from spare_megatron.stacking.plans import Microbatch
from tests.protocol.violation import Violation

MOST_QUESTIONS = 4
STEPS_PER_QUESTION = 32


def loss_digest(params: str, step: int, microbatch: Microbatch, error: str = "") -> int:
    return int(sha256(repr(("loss", params, step, tuple(microbatch), error)).encode()).hexdigest()[:15], 16)


class CountedLosses:
    """The losses that a process has counted in a step; of `every` microbatches one has unusual data, of 0 none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._counted: dict[Microbatch, int] = {}
        self._again: dict[Microbatch, int] = {}

    def begin(self) -> None:
        self._counted.clear()
        self._again.clear()

    def count(self, params: str, step: int, microbatch: Microbatch, error: str) -> None:
        if self._every and (error or loss_digest("data", step, microbatch) % self._every == 0):
            self._counted[microbatch] = loss_digest(params, step, microbatch, error)

    def compute_again(self, params: str, step: int, microbatch: Microbatch, error: str) -> None:
        self._again[microbatch] = loss_digest(params, step, microbatch, error)

    def digests(self) -> tuple[MicrobatchDigest, ...]:
        return tuple(
            MicrobatchDigest(*one, digest) for some in (self._counted, self._again) for one, digest in some.items()
        )


class SuspectObserver:
    """Sees which groups have stated which losses of the step."""

    def __init__(self, hosts: list[set[int]] | None) -> None:
        self._hosts = hosts
        self._reported: dict[Microbatch, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by group
        self._num_questions = self._num_commits = 0

    def begin(self) -> None:
        """Everything of the step is computed from here on."""
        self._reported.clear()

    def voted(self, process: str, step: int, params: str | None, vote: Vote, *, is_wrong: bool) -> None:
        group = int(process.partition(".")[0])
        for item in vote.losses:
            self._reported[item.microbatch][group].add(item.digest)
            if not is_wrong and params is not None and item.digest != loss_digest(params, step, item.microbatch):
                raise Violation(f"{process} votes with a loss of {item.microbatch} that is none of step {step}")

    def asked(self, writer: str, disputes: Iterable[Dispute]) -> None:
        self._num_questions += any(one.is_suspicion and one.num_rounds == 1 and not one.differs for one in disputes)
        if self._num_questions > MOST_QUESTIONS + self._num_commits // STEPS_PER_QUESTION:
            raise Violation(f"{writer} holds the run up for suspects {self._num_questions} times")

    def committed(self, writer: str, votes: Mapping[tuple[int, int], Vote]) -> bool:
        """Whether the commit holds suspects that groups agree about."""
        members = {group for group, _ in votes}
        reported = {(group, item.microbatch, item.digest) for (group, _), vote in votes.items() for item in vote.losses}
        if len({(one, digest) for _, one, digest in reported}) > len({one for _, one, _ in reported}):
            raise Violation(f"{writer} commits though members have other losses of a suspect")
        is_agreed = False
        for group, one, digest in reported:
            agree = any(digest in digests for other, digests in self._reported[one].items() if other != group)
            further = (members if self._hosts is None else members & self._hosts[one.shard]) - self._reported[
                one
            ].keys()
            if not agree and further and self._num_questions < MOST_QUESTIONS:
                raise Violation(f"{writer} commits suspect {one} of {group}, which {further} have not computed")
            is_agreed |= agree
        self._num_commits += 1
        self.begin()
        return is_agreed
