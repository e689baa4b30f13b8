"""Relays of votes over real sockets, all members in one thread: what is sent waits in the sockets."""

import contextlib
import gc
import os
import resource
import socket
import struct
from collections.abc import Iterator

import pytest

from spare_megatron.core.log.relays import BlockVotes
from spare_megatron.formats.frames import Frame, FrameKind
from spare_megatron.stacking.layout import GroupId, Member
from spare_megatron.voting.relay_link import RETRY_ATTEMPTS, RelayLink
from spare_megatron.voting.vote_relay import VoteRelay

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]

LONG_S = 50.0
"""A wait of this length is a failure."""
SHORT_S = 0.05
"""Nothing is to come in this time."""
BLOCK = tuple(Member(GroupId(group)) for group in range(3))
FIRST, SECOND, THIRD = BLOCK


@pytest.fixture
def relay() -> VoteRelay:
    return VoteRelay("127.0.0.1", len(BLOCK))


def link_to(relay: VoteRelay, member: Member, timeout_s: float = LONG_S) -> RelayLink:
    return RelayLink(member, lambda _: relay.address, timeout_s)


def votes_on(attempt: int) -> BlockVotes:
    return BlockVotes(attempt, BLOCK, FIRST, "of the relay")


def undecided() -> bool:
    return False


def collected(relay: VoteRelay, attempt: int, timeout_s: float = LONG_S) -> set[Member]:
    votes = votes_on(attempt)
    relay.collect(votes, timeout_s, undecided)
    return set(votes.votes)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Nothing can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what earlier tests have left in circles would be closed at any time, and leave room
    with contextlib.closing(socket.socket()) as lowest:
        limit = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------------------------------------- a relay and its block


def test_a_relay_without_descriptors_left_waits_no_longer_than_it_may(relay: VoteRelay) -> None:
    """A client cannot be accepted, and keeps connecting."""
    with socket.socket() as stranger, no_descriptors_left():
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        stranger.connect((relay.address.host, relay.address.port))
        assert collected(relay, 1, SHORT_S) == {FIRST}


def test_a_relay_has_the_votes_of_its_block_and_the_block_gets_the_entry(relay: VoteRelay) -> None:
    links = [link_to(relay, member) for member in (SECOND, THIRD)]
    for attempt in range(3):
        for link in links:
            assert link.send(FIRST, attempt, f"vote on {attempt}", attempt)
        votes = votes_on(attempt)
        relay.collect(votes, LONG_S, undecided)
        assert votes.votes == {FIRST: "of the relay", SECOND: f"vote on {attempt}", THIRD: f"vote on {attempt}"}
        relay.pass_on(attempt, f"entry {attempt}")
        for link in links:
            assert link.await_entry(attempt, attempt) == f"entry {attempt}"


def test_a_relay_that_looks_when_its_time_is_over_has_the_votes_that_have_come(relay: VoteRelay) -> None:
    """On a busy machine it took in one of them, gave up all others, and cost their groups a wait."""
    links = [link_to(relay, member) for member in (SECOND, THIRD)]
    for link in links:
        assert link.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0, 0.0) == set(BLOCK)


def test_a_leader_that_polls_after_its_timeout_gets_an_entry_that_has_come(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND, SHORT_S)
    assert link.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0, SHORT_S) == {FIRST, SECOND}
    relay.pass_on(0, "entry")
    link._end_s = 0.0
    assert link.await_entry(0, 0) == "entry"


def test_entries_of_any_length_come_through(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND)
    assert link.send(FIRST, 0, "v" * 30_000, 0)
    votes = votes_on(0)
    relay.collect(votes, SHORT_S, undecided)
    assert votes.votes[SECOND] == "v" * 30_000
    relay.pass_on(0, "e" * 200_000)
    assert link.await_entry(0, 0) == "e" * 200_000


def test_a_relay_waits_once_for_who_is_missing_and_never_for_who_has_left(relay: VoteRelay) -> None:
    second, third = link_to(relay, SECOND), link_to(relay, THIRD)
    assert second.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0, SHORT_S) == {FIRST, SECOND}
    assert second.send(FIRST, 1, "vote", 1)
    assert collected(relay, 1) == {FIRST, SECOND}
    assert third.send(FIRST, 2, "vote", 2)
    assert second.send(FIRST, 2, "vote", 2)
    assert collected(relay, 2, SHORT_S) >= {FIRST, SECOND}
    for link in (second, third):
        assert link.send(FIRST, 3, "vote", 3)
    assert collected(relay, 3) == {FIRST, SECOND, THIRD}
    second.close()
    third.close()
    assert collected(relay, 4) == {FIRST}


def test_a_leader_that_comes_too_late_is_asked_to_vote_directly(relay: VoteRelay) -> None:
    second, third = link_to(relay, SECOND), link_to(relay, THIRD)
    for link in (second, third):
        assert link.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0) == {FIRST, SECOND, THIRD}
    assert second.send(FIRST, 1, "vote", 1)
    assert collected(relay, 1, SHORT_S) == {FIRST, SECOND}
    assert not third.send(FIRST, 1, "vote", 1)
    relay.collect(votes_on(2), LONG_S, lambda: True)
    assert not second.send(FIRST, 2, "vote", 2)
    for link in (second, third):
        assert link.send(FIRST, 3, "vote", 3)
    assert collected(relay, 3) == {FIRST, SECOND, THIRD}


def test_a_waiting_leader_learns_that_the_relay_passes_nothing_on(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND)
    assert link.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0, SHORT_S) == {FIRST, SECOND}
    assert link.send(FIRST, 1, "vote", 1)
    relay.collect(BlockVotes(1, [FIRST, THIRD], FIRST, "of the relay"), SHORT_S, undecided)
    assert link.await_entry(0, 1) == ""


def test_a_relay_does_not_wait_once_the_log_says_something(relay: VoteRelay) -> None:
    votes = votes_on(0)
    relay.collect(votes, LONG_S, lambda: True)
    assert set(votes.votes) == {FIRST}


def test_no_leader_waits_for_a_relay_that_is_gone(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND)
    assert link.send(FIRST, 0, "vote", 0)
    relay.close()
    assert link.await_entry(0, 0) == ""
    assert not link.send(FIRST, 1, "vote", 0)


def test_no_leader_waits_for_a_relay_that_has_not_published_its_address() -> None:
    assert not RelayLink(SECOND, lambda _: None, LONG_S).send(FIRST, 0, "vote", 0)


def test_a_silent_relay_is_waited_for_once_in_many_attempts(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND, SHORT_S)
    assert link.send(FIRST, 0, "vote", 0)
    assert link.await_entry(0, 0) == ""
    assert not any(link.send(FIRST, attempt, "vote", attempt) for attempt in range(1, RETRY_ATTEMPTS))
    assert link.send(FIRST, 1 + RETRY_ATTEMPTS, "vote", 1)


def test_a_relay_that_was_late_is_not_given_up(relay: VoteRelay) -> None:
    link = link_to(relay, SECOND, SHORT_S)
    assert link.send(FIRST, 0, "vote", 0)
    assert link.await_entry(0, 0) == ""
    assert collected(relay, 0, SHORT_S) == {FIRST, SECOND}
    relay.pass_on(0, "entry")
    assert link.send(FIRST, 1, "vote", 1)
    assert collected(relay, 1) == {FIRST, SECOND}


def test_a_leader_that_learns_late_that_the_relay_does_not_vote_for_it_keeps_the_relay(
    relay: VoteRelay,
) -> None:
    link = link_to(relay, SECOND, SHORT_S)
    assert link.send(FIRST, 0, "vote", 0)
    assert link.await_entry(0, 0) == ""
    relay.collect(BlockVotes(0, [FIRST, THIRD], FIRST, "of the relay"), SHORT_S, undecided)
    relay.pass_on(0, "entry")
    assert link.send(FIRST, 1, "vote", 1)


def test_entries_come_only_to_those_whose_votes_the_relay_has_taken(relay: VoteRelay) -> None:
    """A leader that receives one relies on it."""
    second, third = link_to(relay, SECOND), link_to(relay, THIRD, SHORT_S)
    for link in (second, third):
        assert link.send(FIRST, 0, "vote", 0)
    assert collected(relay, 0) == {FIRST, SECOND, THIRD}
    assert second.send(FIRST, 1, "vote", 1)
    assert collected(relay, 1, SHORT_S) == {FIRST, SECOND}
    relay.pass_on(0, "entry")
    assert second.await_entry(0, 1) == "entry"
    assert not third.send(FIRST, 1, "vote", 0)
    assert third.await_entry(0, 1) == ""


def test_another_relay_is_asked_when_it_takes_the_place_of_the_first(relay: VoteRelay) -> None:
    relays = {FIRST: relay, THIRD: VoteRelay("127.0.0.1", 3)}
    link = RelayLink(SECOND, lambda member: relays[member].address, LONG_S)
    for attempt, at in enumerate((FIRST, THIRD)):
        assert link.send(at, attempt, "vote", 0)
        votes = BlockVotes(attempt, (at, SECOND), at, "mine")
        relays[at].collect(votes, LONG_S, undecided)
        assert set(votes.votes) == {at, SECOND}


def test_a_rank_with_many_descriptors_votes_like_any_other(relay: VoteRelay) -> None:
    """A rank has connections to all groups, and `select` takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    held = []
    try:
        while not held or held[-1] < 1023:
            held.append(os.dup(relay._listener.fileno()))
        link = link_to(relay, SECOND)
        assert link.send(FIRST, 0, "vote", 0)
        assert collected(relay, 0, SHORT_S) == {FIRST, SECOND}
        relay.pass_on(0, "entry")
        assert link.await_entry(0, 0) == "entry"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "data",
    [
        Frame(FrameKind.VOTE, 0, (1, 0), b"forged").packed("00" * 32),
        struct.pack("!BqqqI", 0, 0, 1, 0, 2**31) + b"x" * 100,
        struct.pack("!BqqqI", 77, 0, 1, 0, 0) + b"x" * 100,
        b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n" * 10,
    ],
    ids=["without the secret", "endless", "of no kind", "of another program"],
)
def test_a_stranger_is_ignored(relay: VoteRelay, data: bytes) -> None:
    with socket.create_connection((relay.address.host, relay.address.port), timeout=LONG_S) as stranger:
        stranger.sendall(data)
        assert collected(relay, 0, SHORT_S) == {FIRST}
        stranger.settimeout(LONG_S)
        assert not received(stranger)
    link = link_to(relay, SECOND)
    assert link.send(FIRST, 1, "vote", 0)
    assert collected(relay, 1, SHORT_S) == {FIRST, SECOND}


def test_a_damaged_vote_is_not_counted(relay: VoteRelay) -> None:
    data = bytearray(Frame(FrameKind.VOTE, 0, (1, 0), b"yes").packed(relay.address.token))
    data[-1] ^= 1
    with socket.create_connection((relay.address.host, relay.address.port), timeout=LONG_S) as member:
        member.sendall(bytes(data))
        assert collected(relay, 0, SHORT_S) == {FIRST}


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""
