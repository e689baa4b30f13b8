"""How the leader of a group passes log entries to its other ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.core.log.entries import Commit, Entry, Fence, encode_entry
from spare_megatron.core.log.events import RestartState
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.voting.agreement import GroupAgreement
from tests.memory_store import MemoryStore


class _Rank(GroupAgreement):
    """A rank whose broadcasts go through a list: the leader appends messages, the other rank takes them in order."""

    def __init__(self, rank: int, store: MemoryStore, messages: list[torch.Tensor]) -> None:
        ranks = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        super().__init__(Member(GroupId(0)), ranks, DecisionLog(store), 1.0, num_positions=1)  # type: ignore[arg-type]
        self._messages = messages

    def _send_from_leader(self, values: torch.Tensor) -> None:
        if self.is_leader:
            self._messages.append(values.clone())
        else:
            sent = self._messages.pop(0)
            assert values.shape == sent.shape, "the ranks of a group call one collective with different sizes"
            values.copy_(sent)


def _group() -> tuple[_Rank, _Rank, list[torch.Tensor]]:
    messages: list[torch.Tensor] = []
    store = MemoryStore({})
    return _Rank(0, store, messages), _Rank(1, store, messages), messages


def _fence(reason: str) -> Entry:
    return Fence(group=GroupId(1), reason=reason)


@pytest.mark.parametrize("num_bytes", [200, 1015, 1016, 1017, 5000], ids=str)
def test_all_ranks_read_the_entry_of_the_leader_whatever_its_length(num_bytes: int) -> None:
    leader, other, messages = _group()
    entry = _fence("x" * (num_bytes - len(encode_entry(_fence("")).encode()) - len(',"reason":""')))
    assert len(encode_entry(entry).encode()) == num_bytes
    leader.append(0, entry)
    assert leader.read_entry(0) == entry
    assert other.read_entry(0) == entry
    assert not messages


def test_a_usual_entry_is_passed_on_with_one_collective() -> None:
    leader, other, messages = _group()
    entry = Commit(step=123456, attempt=123499, save=True, at_s=98765.432)
    leader.append(0, entry)
    leader.read_entry(0)
    assert len(messages) == 1
    assert other.read_entry(0) == entry


def test_many_entries_are_passed_on_in_order() -> None:
    leader, other, _ = _group()
    entries = [_fence("x" * number) for number in range(100)]
    for index, entry in enumerate(entries):
        leader.append(index, entry)
    read = leader.read_entries(0)
    assert len(read) >= len(entries) / 2
    assert read == entries[: len(read)]
    assert other.read_entries(0) == read


def test_a_leader_whose_entry_came_too_late_reads_the_one_that_stands() -> None:
    leader, other, _ = _group()
    late, _, _ = _group()
    late.log = leader.log
    leader.append(0, _fence("first"))
    late.append(0, _fence("second"))
    assert late.read_entry(0) == _fence("first")
    assert leader.read_entry(0) == other.read_entry(0) == _fence("first")


def test_a_leader_reads_who_waits_and_with_how_many_stages() -> None:
    data: dict[str, Any] = {}
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    members = [Member(GroupId(group), 1 + group) for group in range(3)]

    def agreement(member: Member, stages: int | None = None) -> GroupAgreement:
        log = DecisionLog(MemoryStore(data))  # type: ignore[arg-type]
        groups = [GroupId(group) for group in range(4)]
        return GroupAgreement(member, alone, log, 1.0, groups, num_positions=6, stages=stages)  # type: ignore[arg-type]

    reader = agreement(members[0])
    reader.announce()
    assert reader.waiting(members[:1]) == ((), {})
    agreement(members[1], stages=3).announce()
    agreement(members[2]).announce()
    assert reader.waiting(members[:1]) == ((members[1], members[2]), {1: 3})
    found = reader.read_votes(5, members[:1])
    assert (found.waiting, found.stages) == ((members[1], members[2]), {1: 3})
    again = Member(GroupId(1), 9)
    agreement(again).announce()
    assert reader.waiting(members[:1]) == ((again, members[2]), {}), "its last incarnation has all stages"
    agreement(again, stages=2).announce_restart(RestartState(member=again, candidates=()))
    reader.announce_restart(RestartState(member=members[0], candidates=()))
    groups = [member.group for member in (members[0], again)]
    assert [state.stages for state in reader.waiting_to_restart(groups)] == [None, 2]
