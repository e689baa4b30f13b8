"""Agreement between the ranks of a group, the group's votes, and the log entries it reads. Only the leader, rank 0,
exchanges votes and entries with the control store; every rank may poll whether an entry is written.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from spare_megatron.core.log.entries import Entry, decode_entry, encode_entry
from spare_megatron.core.log.events import RestartState, VotesRead
from spare_megatron.core.log.gradient_guard import GradientFinding
from spare_megatron.core.log.loss_sums import LossSum
from spare_megatron.core.log.relays import Blocks
from spare_megatron.core.log.votes import Vote
from spare_megatron.formats.codec import decode, set_fields
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.store.interface import read_values, write_value
from spare_megatron.voting.fencing import fence, fences

T = TypeVar("T")

TURN_S = 2.0
"""How long the other ranks of a group wait at most for their leader, which polls the store."""
_POLL_S = 0.05
_LENGTH_BYTES = 8
_FIRST_BYTES = 1016
"""Bytes of text that the first message of a broadcast holds; most entries need no second one."""


class Fenced(Exception):
    """The log fences this group. It must not touch the run any more."""


class GroupBroken(Exception):
    """A rank of this group is gone, so the group is lost."""


class Announcement(NamedTuple):
    """What a group that waits to be admitted publishes; `stages`: None if it has the whole pipeline."""

    incarnation: int
    stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What one rank found in an attempt; fields as in `GroupOpinion`, by position those of its own slabs. `loss`,
    `terms`: None where another stage knows them.
    """

    is_complete: bool
    num_complete: Mapping[int, int]
    work_digest: str
    loss: LossSum | None
    finding: GradientFinding
    terms: Sequence[LossSum | None] = ()
    compute_s: float = 0.0
    pace_s: float = 0.0
    ends: bool = False
    wrong_sums: Mapping[int, int] = field(default_factory=dict)
    has_suspects: bool = False
    memory: Sequence[float] = ()
    wrong_numbers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpinion:
    """What all ranks of a group found in one attempt.

    `is_complete`: every rank holds the whole cross-group sum. `loss`: None unless complete, and `terms` empty. Per
    position, `num_complete` buckets are summed, and the first bucket whose sum contradicts its checksum is in
    `wrong_sums`. Passes took `compute_s` seconds per rank; `pace_s`: seconds per microbatch of the slowest. `finding`:
    the worst about the group's own gradients. `ends`: some rank is asked to end the run. `has_suspects`: some rank has
    suspect losses. `memory`: `step_values.MEMORY` of the fullest ranks. `wrong_numbers`: what own checks have found
    since the step began, of a rank alone or named with the rank, by ranks that hold `wrong_positions`.
    """

    is_complete: bool
    loss: LossSum | None
    num_complete: tuple[int, ...]
    compute_s: tuple[float, ...] = ()
    pace_s: float = 0.0
    finding: GradientFinding = GradientFinding.SOUND
    terms: tuple[LossSum, ...] = ()
    ends: bool = False
    wrong_sums: tuple[int | None, ...] = ()
    has_suspects: bool = False
    memory: tuple[float, ...] = ()
    wrong_positions: tuple[int, ...] = ()
    wrong_numbers: tuple[str, ...] = ()

    @property
    def has_wrong_sum(self) -> bool:
        return any(bucket is not None for bucket in self.wrong_sums)


@dataclass
class GroupAgreement:
    """One rank's part in its group's agreement. Collective methods raise `GroupBroken` if another rank is gone.
    `ranks`: for CPU tensors, with a timeout beyond decision_timeout_s, the longest wait for an entry. `may_come_back`:
    groups that may ask to be admitted. `fan_in`: most groups whose votes one relay casts. `num_positions`: of slabs.
    `stages`: of the group, None if it has the whole pipeline.
    """

    member: Member
    ranks: dist.ProcessGroup
    log: DecisionLog
    decision_timeout_s: float
    may_come_back: Sequence[GroupId] = ()
    fan_in: int = 1
    num_positions: int = field(kw_only=True)
    stages: int | None = None

    def __post_init__(self) -> None:
        self._voters: Sequence[Member] = ()
        self._blocks = Blocks((), self.fan_in)
        self._is_alone = self.ranks.size() == 1
        self.is_leader = self.ranks.rank() == 0
        self._appended = (-1, "")  # index and text of the entry that the log holds where this rank wrote last

    def is_written(self, index: int) -> bool:
        """Whether the log entry is written; this rank alone asks the store."""
        return self.log.has(index)

    def poll_entry(self, index: int, timeout_s: float) -> bool:
        """Whether the log entry is written within this time; this rank alone asks the store, now and then."""
        end_s = time.monotonic() + timeout_s
        while not (is_written := self.is_written(index)) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        return is_written

    def report_broken(self, index: int, cause: str) -> str:
        """Marks the collective preceding entry `index` as failed unless that is written; the first mark's cause."""
        return cause if self.is_written(index) else self.log.report_broken(index, f"group {self.member.group}: {cause}")

    def is_over(self, index: int) -> bool:
        """Whether the entry at the index is written, or any rank has marked the collective preceding it as failed."""
        return self.is_written(index) or self.log.is_broken(index)

    def highest(self, value: int) -> int:
        """Maximum of the ranks' values. Collective over: all ranks of the group."""
        values = torch.tensor([value])
        self._reduce(values, dist.ReduceOp.MAX)
        return int(values)

    def settle(self, outcome: RankOutcome) -> GroupOpinion:
        """Combines the ranks' outcomes into the group's opinion. Collective over: all ranks of the group. Raises
        RuntimeError if they computed different work.
        """
        work = float(int(outcome.work_digest[:12], 16))  # 48 bits: exact as a float64, also negated
        unknown = (-math.inf, -math.inf)
        sums = (outcome.loss, *outcome.terms)
        known = [value for one in sums for value in one or unknown]  # a float64 counts tokens up to 2^53
        complete, wrong = [0.0] * self.num_positions, [0.0] * self.num_positions
        for position, number in outcome.num_complete.items():
            complete[position] = float(number)
        for position, bucket in outcome.wrong_sums.items():
            wrong[position] = bucket + 1.0
        compute_s = [0.0] * self.ranks.size()
        compute_s[self.ranks.rank()] = outcome.compute_s
        flags = [float(outcome.finding), *map(float, (outcome.ends, outcome.has_suspects, bool(outcome.wrong_numbers)))]
        own = [float(not outcome.is_complete), work, -work, *flags, outcome.pace_s]
        parts = [own, complete, compute_s, wrong, outcome.memory, known]
        mine = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
        self._reduce(mine, dist.ReduceOp.MAX)
        own, complete, compute_s, wrong, memory, known = (part.tolist() for part in mine.split([*map(len, parts)]))
        has_failed, highest, negated_lowest, worst, is_end_asked, is_suspicious, has_found, pace_s = own
        if highest != -negated_lowest:
            raise RuntimeError(f"the ranks of group {self.member.group} computed different work in one step")
        pairs = zip(known[::2], known[1::2], strict=True)
        stated = self.gathered((outcome.wrong_numbers, [*outcome.num_complete])) if has_found else []
        totals = [] if has_failed else [LossSum(total, int(count)) for total, count in pairs]
        return GroupOpinion(
            is_complete=not has_failed,
            loss=totals[0] if totals else None,
            terms=tuple(totals[1:]),
            num_complete=tuple(map(int, complete)),
            compute_s=tuple(compute_s),
            pace_s=pace_s,
            finding=GradientFinding(int(worst)),
            wrong_sums=tuple(int(number) - 1 if number else None for number in wrong),
            ends=bool(is_end_asked),
            has_suspects=bool(is_suspicious),
            memory=tuple(memory),
            wrong_positions=tuple(position for text, held in stated if text for position in held),
            wrong_numbers=tuple(f"rank {rank}: {text}" for rank, (text, _) in enumerate(stated) if text),
        )

    def shared(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether all ranks set it. Collective over: all ranks of the group, with equally many flags."""
        values = torch.tensor([int(flag) for flag in flags])
        self._reduce(values, dist.ReduceOp.MIN)
        return [bool(value) for value in values.tolist()]

    def gathered(self, value: T) -> list[T]:
        """The ranks' values in rank order. Collective over: all ranks of the group."""
        if self._is_alone:
            return [value]
        values: list[Any] = [None] * self.ranks.size()
        self._collective(lambda: dist.all_gather_object(values, value, group=self.ranks))
        return values

    def combine_digests(self, digests: Mapping[int, Sequence[str]]) -> list[str]:
        """For each place in what a slab has, by position, SHA-256 over the digests of all slabs in order. Collective
        over: all ranks of the group.
        """
        own = {position: bytes.fromhex("".join(of_slab)) for position, of_slab in digests.items()}
        num_bytes = len(next(iter(own.values())))
        table = torch.zeros(self.num_positions, num_bytes, dtype=torch.uint8)
        for position, row in own.items():
            table[position] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        self._reduce(table, dist.ReduceOp.MAX)
        rows = [bytes(row) for row in table.tolist()]
        size = num_bytes // len(next(iter(digests.values())))
        starts = range(0, num_bytes, size)
        return [hashlib.sha256(b"".join(row[start : start + size] for row in rows)).hexdigest() for start in starts]

    def blocks(self, voters: Sequence[Member]) -> Blocks:
        """The voters by block; cached while the same `voters` object is passed."""
        if voters is not self._voters:
            self._voters, self._blocks = voters, Blocks(voters, self.fan_in)
        return self._blocks

    def cast(
        self, attempt: int, votes: Mapping[Member, str], voters: Sequence[Member], forget: Sequence[int] = ()
    ) -> VotesRead | None:
        """Leader: casts encoded votes, also those that it relays; votes on the attempts in `forget` are no longer read.
        Returns all votes if the last one may be among them, for the leader to decide.
        """
        num_votes = self.log.cast(attempt, self.member, votes, forget)
        return self.read_votes(attempt, voters) if num_votes >= len(voters) else None

    def num_votes(self, attempt: int) -> int:
        """Leader: votes cast so far, repeated casts included; never too low."""
        return self.log.num_votes(attempt)

    def read_votes(self, attempt: int, voters: Sequence[Member]) -> VotesRead:
        """Leader: the votes that these voters have cast so far, and the groups that wait to be admitted."""
        votes = self.log.votes(attempt, voters, self.blocks(voters).relays)
        decoded = {text: decode(text, Vote) for text in set(votes.values())}
        counted = {GroupId(g): decoded[text] for g, text in votes.items()}
        waiting, stages = self.waiting(voters)
        return VotesRead(attempt=attempt, votes=counted, waiting=waiting, stages=stages)

    def waiting(self, voters: Sequence[Member]) -> tuple[tuple[Member, ...], dict[GroupId, int]]:
        """Leader: the members, other than these groups, that have announced that they wait to be admitted; and the
        stages of those that have fewer than the whole pipeline.
        """
        present = {voter.group for voter in voters}
        absent = [group for group in self.may_come_back if group not in present]
        read = read_values(self.log.store, [keys.waiting(group) for group in absent], Announcement)
        found = [(group, one) for group, one in zip(absent, read, strict=True) if one is not None]
        waiting = tuple(Member(group, one.incarnation) for group, one in found)
        return waiting, {group: one.stages for group, one in found if one.stages is not None}

    # ----------------------------------------------------------------------------------------------------- rejoining

    def is_at_end(self, index: int) -> bool:
        """Whether the entry at the index is not written yet. Collective over: all ranks of the group."""
        mine = torch.tensor([int(self.is_leader and not self.log.read(index, 1))])
        self._send_from_leader(mine)
        return bool(mine)

    def announce(self) -> None:
        """On the leader, announces that the group is up and waits to be admitted."""
        if self.is_leader:
            announced = Announcement(self.member.incarnation, self.stages)
            write_value(self.log.store, keys.waiting(self.member.group), announced)

    def announce_restart(self, waiting: RestartState) -> None:
        """Leader: announces that the group waits for the restart, and what state it can restart from."""
        announced = replace(waiting, stages=self.stages)
        write_value(self.log.store, keys.restart(waiting.member.group), set_fields(announced))

    def waiting_to_restart(self, groups: Sequence[GroupId]) -> tuple[RestartState, ...]:
        """The latest restart announcement of each of these groups that made one; this rank alone asks the store."""
        found = read_values(self.log.store, [keys.restart(group) for group in groups], RestartState)
        return tuple(state for state in found if state is not None)

    def is_lost(self, other: Member, from_index: int) -> bool:
        """Whether an entry from this index on fences the member; this rank alone asks the store."""
        index = from_index
        while self.log.has(index):
            if fences(self.log.wait(index, self.decision_timeout_s), other):
                return True
            index += 1
        return False

    def publish_digest(self, index: int, digest: str) -> None:
        """On the leader, publishes the digest of the group's parameters as of this entry, for newcomers."""
        if self.is_leader:
            write_value(self.log.store, keys.digest(index, self.member.group), digest)

    def digests(self, index: int, groups: Sequence[GroupId]) -> list[str | None]:
        return read_values(self.log.store, [keys.digest(index, group) for group in groups], str)

    def append(self, index: int, entry: Entry) -> None:
        """Writes the entry if the index is free; `await_entry` then has the entry stored there without asking."""
        self._appended = (index, self.log.append(index, encode_entry(entry)))

    def fence(self, member: Member, reason: str, from_index: int) -> int:
        """Leader: makes sure that the log fences the member; returns the index of an entry that does."""
        return fence(self.log, member, reason, from_index)

    def await_entry(self, index: int) -> str:
        """Leader: the encoded entry, as soon as it is written. Raises StoreTimeout after the decision timeout."""
        appended_at, text = self._appended
        return text if index == appended_at else self.log.wait(index, self.decision_timeout_s)

    def read_entry(self, index: int, text: str = "") -> Entry:
        """The entry at the index, as soon as it is written; `text`: the leader's text of it, if it has one already.
        Collective over: all ranks of the group; only the leader waits on the store. StoreTimeout: after the decision
        timeout.
        """
        text = self._broadcast((text or self.await_entry(index)) if self.is_leader else "")
        self.log.note(index, text)  # every rank finds out by itself that the store has lost it
        return decode_entry(text)

    def read_entries(self, index: int) -> list[Entry]:
        """Likewise, with entries already written after it. Collective as `read_entry`."""
        texts = self.log.read(index) if self.is_leader else []
        if self.is_leader and not texts:
            texts = [self.await_entry(index)]
        texts = self._broadcast("\n".join(texts)).split("\n")
        self.log.note(index + len(texts) - 1, texts[-1])
        return [decode_entry(text) for text in texts]

    def _broadcast(self, text: str) -> str:
        if self._is_alone:
            return text
        content = text.encode()
        head, rest = content[:_FIRST_BYTES], content[_FIRST_BYTES:]
        length = len(content).to_bytes(_LENGTH_BYTES, "little")
        first = torch.frombuffer(bytearray(length + head.ljust(_FIRST_BYTES, b"\0")), dtype=torch.uint8)
        self._send_from_leader(first)
        received = bytes(first.numpy())
        left = int.from_bytes(received[:_LENGTH_BYTES], "little") - _FIRST_BYTES
        if left <= 0:
            return received[_LENGTH_BYTES : _LENGTH_BYTES + left + _FIRST_BYTES].decode()
        second = torch.frombuffer(bytearray(rest or bytes(left)), dtype=torch.uint8)
        self._send_from_leader(second)
        return (received[_LENGTH_BYTES:] + bytes(second.numpy())).decode()

    def _reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if not self._is_alone:
            self._collective(lambda: dist.all_reduce(values, op=op, group=self.ranks))

    def _send_from_leader(self, values: torch.Tensor) -> None:
        if not self._is_alone:
            self._collective(lambda: dist.broadcast(values, group=self.ranks, group_src=0))

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise GroupBroken(f"a rank of group {self.member.group} is gone: {error}") from error
