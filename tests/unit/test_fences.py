"""Fences and beats when the log is long, or others are always faster: no live group may be fenced meanwhile."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from spare_megatron.config.schema import LayoutConfig, RunConfig, SpareConfig, TrainConfig
from spare_megatron.core.log.actions import StopWipeOut
from spare_megatron.core.log.entries import Commit, Entry, Fence, Retry, encode_entry
from spare_megatron.process.readiness import note_ready
from spare_megatron.stacking.layout import GroupId, Layout, Member, Slabs
from spare_megatron.store import keys
from spare_megatron.store.decision_log import DecisionLog
from spare_megatron.supervisor.places.group_rendezvous import publish_fence
from spare_megatron.supervisor.rank_exits import FOUND_FENCED
from spare_megatron.supervisor.store_watch import (
    FenceWanted,
    FenceWritten,
    LinkEvent,
    LinkLost,
    LogStopped,
    QuarantineChanged,
    StoreLink,
)
from spare_megatron.voting.fencing import fence
from spare_megatron.voting.log_follower import controller_setup
from tests.unit.memory_store import MemoryStore

pytestmark = pytest.mark.timeout(60)

LOG = "log/"
WAIT_S = 20.0
NUM_BEATS = 3
CONFIG = RunConfig(layout=LayoutConfig(num_groups=3), spare=SpareConfig(redundancy=2), train=TrainConfig(steps=2))
LOST = Member(GroupId(2), 1)


class Log:
    """A store of a log and little else; counts what it is asked."""

    def __init__(self, *entries: Entry) -> None:
        self.values = {keys.entry(index): encode_entry(entry) for index, entry in enumerate(entries)}
        self.values[keys.ALL_GROUPS_READY] = "yes"
        self.num_requests = self.num_beats = 0

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        self.num_requests += 1
        return self.values.setdefault(key, value)

    def get(self, keys: Sequence[str]) -> list[str | None]:
        self.num_requests += 1
        return [self.values.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        self.num_requests += 1
        return key in self.values

    def wait(self, key: str, timeout_s: float) -> str:
        return self.values[key]

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.num_beats += 1


def commits(number: int) -> list[Entry]:
    return [Commit(step=index, attempt=index) for index in range(number)]


def log_of(store: Log) -> DecisionLog:
    return DecisionLog(store)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- fence


def test_the_head_is_found_from_every_index_before_it() -> None:
    store = Log()
    log = log_of(store)
    for length in range(70):
        assert [log.find_head(hint) for hint in range(length + 1)] == [length] * (length + 1)
        store.values[keys.entry(length)] = "entry"


def test_the_head_of_a_long_log_is_found_in_few_reads() -> None:
    for length in (1000, 1023, 1024, 1025):
        store = Log(*commits(length))
        for hint in {0, 1, length // 2, length - 1, length}:
            store.num_requests = 0
            assert log_of(store).find_head(hint) == length
            assert store.num_requests <= 2 * math.log2(length - hint + 1) + 2


def test_a_fence_by_a_client_new_to_a_long_log_takes_few_requests() -> None:
    store = Log(*commits(2000))
    assert fence(log_of(store), LOST, "dead", from_index=0) == 2000
    assert store.values[keys.entry(2000)] == encode_entry(Fence(group=LOST.group, incarnation=1, reason="dead"))
    assert store.num_requests < 40


def test_a_fence_is_not_repeated_right_after_it_whatever_is_known_of_the_log() -> None:
    for run_state in (0, 3, 7, 9, 10, 95, 99, 101):
        for later in (0, 1, 10, 40):
            entries = [*commits(run_state), Fence(group=LOST.group, incarnation=1), *commits(later)]
            for hint in {0, run_state // 2, run_state, run_state + 1, len(entries)}:
                assert fence(log_of(Log(*entries)), LOST, "dead", from_index=hint) == run_state


def test_fences_of_other_groups_and_earlier_incarnations_are_ignored() -> None:
    store = Log(Fence(group=GroupId(1), incarnation=1), Fence(group=LOST.group, incarnation=0))
    assert fence(log_of(store), LOST, "dead", from_index=0) == 2


# -------------------------------------------------------------------------------------------------------------- beats


class Endless(Log):
    """Has something more to be done until it has seen some beats meanwhile, or has waited for them for long."""

    def __init__(self, patience: int) -> None:
        super().__init__()
        self._patience = patience
        self.num_turns = 0
        self.on_turn: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        return self.num_beats >= NUM_BEATS or self.num_turns >= self._patience

    def put_if_absent(self, key: str, value: str, after: str | None = None) -> str:
        self.on_turn()
        self.num_turns += 1
        return super().put_if_absent(key, value, after)

    def beat(self, key: str, value: str, ttl_s: int) -> None:
        self.num_beats += self.num_turns > 0  # on a busy machine many may be due before there is anything to be done


class Growing(Endless):
    """A log that has some hundred entries more whenever a reader asks for the next."""

    def get(self, names: Sequence[str]) -> list[str | None]:
        num_entries = sum(key.startswith(LOG) for key in self.values)
        if list(names) == [keys.entry(num_entries)]:
            self.on_turn()
            self.num_turns += 1
        return super().get(names)


def link_to(store: Log) -> tuple[StoreLink, Connection]:
    inbox, outbox = Pipe(duplex=False)
    link = StoreLink(
        node=0,
        layout=Layout(num_groups=3),
        interval_s=0.01,
        connect=lambda: store,  # type: ignore[arg-type, return-value]
        outbox=outbox,
    )
    return link, inbox


def next_event(inbox: Connection) -> LinkEvent:
    assert inbox.poll(WAIT_S)
    event: LinkEvent = inbox.recv()
    return event


def wanted(member: Member) -> FenceWanted:
    return FenceWanted(group=member.group, member=member, rank=0, cause="dead", error="", from_index=0)


def test_who_loses_every_race_for_an_entry_goes_on_beating_and_knows_that_the_store_answers() -> None:
    store = Endless(patience=20_000)
    link, inbox = link_to(store)
    unanswered_s: list[float] = []

    def lose() -> None:
        unanswered_s.append(link.unanswered_s())
        link._since_s = time.monotonic() - 1e6
        if not store.is_over:
            store.values[keys.entry(store.num_turns)] = encode_entry(Retry(step=0, attempt=0))

    store.on_turn = lose
    link.fence(wanted(LOST))
    link.start()
    event = next_event(inbox)
    link.stop(WAIT_S)
    assert isinstance(event, FenceWritten)
    assert event.entry_index == store.num_turns - 1 > 0
    assert store.num_beats >= NUM_BEATS
    assert max(unanswered_s) < 1e6


@pytest.mark.parametrize("concerns_all", [True, False])
def test_training_does_not_begin_without_a_group_that_raised_what_holds_for_all(concerns_all: bool) -> None:
    """The others trained on until the driver had read of it: to the end, if that took long enough."""
    store = MemoryStore()
    link, inbox = link_to(store)  # type: ignore[arg-type]
    for group in (0, 1):
        note_ready(store, GroupId(group), "itself", 3)  # type: ignore[arg-type]
    link.fence(replace(wanted(LOST), concerns_all=concerns_all))
    link.start()
    event = next_event(inbox)
    link.stop(WAIT_S)
    assert isinstance(event, FenceWritten)
    assert event.before_training
    assert store.exists(keys.ALL_GROUPS_READY) == (not concerns_all)


def test_who_has_always_one_more_fence_to_write_goes_on_beating() -> None:
    store = Endless(patience=1000)
    link, inbox = link_to(store)

    def want_another() -> None:
        if not store.is_over:
            link.fence(wanted(Member(LOST.group, store.num_turns + 1)))

    store.on_turn = want_another
    link.fence(wanted(Member(LOST.group, 0)))
    link.start()
    num_fences = 0
    while num_fences == 0 or inbox.poll(0) or not store.is_over:
        assert isinstance(next_event(inbox), FenceWritten)
        num_fences += 1
    link.stop(WAIT_S)
    assert store.num_beats >= NUM_BEATS


def test_who_follows_a_long_log_goes_on_beating_and_knows_that_the_store_answers() -> None:
    store = Growing(patience=1000)
    link, inbox = link_to(store)
    unanswered_s: list[float] = []
    num_entries = 0

    def lengthen() -> None:
        nonlocal num_entries
        unanswered_s.append(link.unanswered_s())
        link._since_s = time.monotonic() - 1e6
        next_entries = [GroupId(0), GroupId(2)] if store.is_over else [GroupId(1)] * 300
        for group in next_entries:
            store.values[keys.entry(num_entries)] = encode_entry(Fence(group=group))
            num_entries += 1
        if store.is_over:
            store.on_turn = lambda: None

    store.on_turn = lengthen
    link.follow(controller_setup(CONFIG))
    link.start()
    event = next_event(inbox)
    link.stop(WAIT_S)
    assert isinstance(event, LogStopped)
    assert isinstance(event.stop, StopWipeOut)
    assert store.num_turns > 1
    assert store.num_beats >= NUM_BEATS
    assert max(unanswered_s[1:]) < 1e6


@pytest.mark.parametrize(
    ("cause", "reported"), [(FOUND_FENCED, "fenced: audit of microbatch 1"), ("SIGKILL", "SIGKILL")]
)
def test_a_group_that_finds_itself_fenced_is_reported_with_the_reason_of_the_entry(cause: str, reported: str) -> None:
    """Also where it is divided among nodes, and another of them has published the fence."""
    verdict = Fence(group=LOST.group, incarnation=LOST.incarnation, reason="audit of microbatch 1", is_outvoted=True)
    for layout in (Layout(num_groups=3), Layout(num_groups=3, pipeline_parallel=2, num_nodes=6)):
        for is_published in (False, True):
            store = MemoryStore({keys.entry(0): encode_entry(Fence(group=GroupId(0))), keys.ALL_GROUPS_READY: "yes"})
            store.put(keys.entry(1), encode_entry(verdict))
            if is_published:
                publish_fence(store, LOST, 1, 0, "a peer is lost")
            inbox, outbox = Pipe(duplex=False)
            node = layout.num_nodes - 1
            link = StoreLink(node=node, layout=layout, interval_s=1.0, connect=lambda store=store: store, outbox=outbox)
            link._fence(store, link._begin(store), replace(wanted(LOST), cause=cause))
            events = [next_event(inbox)]
            while not isinstance(events[-1], FenceWritten):
                events.append(next_event(inbox))
            assert (events[-1].wanted.cause, events[-1].entry_index) == (reported, 1)
            if layout.num_nodes > 1 and not is_published:
                assert store.values[keys.part_fenced(LOST)] == f'[1,0,"{reported}"]'


@pytest.mark.parametrize(("stages", "blamed"), [(3, {1}), (2, {0})])
def test_the_machine_is_quarantined_whose_rank_holds_the_wrong_position(stages: int, blamed: set[int]) -> None:
    """Of 6 layers in 3 or 2 stages the third one is the second slab: with 3 stages rank 1 has it, with 2 rank 0."""
    layout = Layout(num_groups=3, pipeline_parallel=3, least_pipeline_parallel=2, num_nodes=9)
    verdict = Fence(group=LOST.group, incarnation=LOST.incarnation, is_outvoted=True, wrong_positions=(1,))
    store = MemoryStore({keys.entry(0): encode_entry(verdict), keys.ALL_GROUPS_READY: "yes"})
    store.put(keys.group_stages(LOST), str(stages))
    first, found = layout.nodes_of(LOST.group)[0], set()
    for node in layout.nodes_of(LOST.group, stages):
        inbox, outbox = Pipe(duplex=False)
        link = StoreLink(
            node=node,
            layout=layout,
            interval_s=1.0,
            connect=lambda: store,  # type: ignore[arg-type, return-value]
            outbox=outbox,
            slabs=Slabs(6, layout.lengths),
        )
        link._fence(store, link._begin(store), replace(wanted(LOST), cause=FOUND_FENCED))  # type: ignore[arg-type]
        event = next_event(inbox)
        if isinstance(event, QuarantineChanged) and event.own is not None:
            found.add(event.own.place - first)
    assert found == blamed


def test_a_link_that_breaks_in_whatever_way_says_so() -> None:
    """A thread that ended silently left the node without a thread to fence its groups."""
    store = Log()
    link, inbox = link_to(store)

    def beat(key: str, value: str, ttl_s: int) -> None:
        raise AttributeError("no such thing as a socket")

    store.beat = beat  # type: ignore[method-assign]
    link.start()
    assert next_event(inbox) == LinkLost(reason="AttributeError: no such thing as a socket")
    link.stop(WAIT_S)
