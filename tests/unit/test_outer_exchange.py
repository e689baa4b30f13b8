"""What ranks of several sites read from each other, over real sockets."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from spare_megatron.formats.frames import Address
from spare_megatron.rank.outer_exchange import Fetch, OuterSource, SiteContent
from spare_megatron.state.transfer.piece_server import PieceServer

CONTENT = torch.arange(3 * 2**20 + 5, dtype=torch.int64).to(torch.uint8)


@pytest.fixture
def served() -> Iterator[tuple[OuterSource, Address]]:
    source = OuterSource()
    source.offer("differences 0", 7, [CONTENT[:10], CONTENT[10:]])
    server = PieceServer("127.0.0.1", source, 5.0)
    server.start()
    with contextlib.closing(server):
        yield source, server.address


def fetched(address: Address, *, number: int = 7, size: int = len(CONTENT), failed: Fetch | None = None) -> Fetch:
    fetch = Fetch(SiteContent("differences", number, {0: str(address)}), {0: size}, 5.0, failed)
    fetch.start()
    fetch.join(20.0)
    assert not fetch.is_alive()
    return fetch


def test_all_bytes_come_and_count(served: tuple[OuterSource, Address]) -> None:
    fetch = fetched(served[1])
    assert (fetch.is_complete, fetch.failure, fetch.num_fetched) == (True, "", len(CONTENT))
    assert torch.equal(fetch.contents[0], CONTENT)


def test_what_a_site_offers_of_another_step_or_model_is_not_taken(served: tuple[OuterSource, Address]) -> None:
    source, address = served
    assert "that of 7 steps" in fetched(address, number=6).failure
    assert not fetched(address, size=len(CONTENT) + 1).is_complete
    source.offer("differences 0", 8, [CONTENT])
    assert fetched(address, number=8).is_complete


def test_a_site_without_the_token_gets_nothing(served: tuple[OuterSource, Address]) -> None:
    fetch = fetched(replace(served[1], token="0" * 64))
    assert not fetch.is_complete
    assert fetch.num_fetched == 0


@contextlib.contextmanager
def relayed(address: Address, change: Callable[[int, bytearray], bytearray | None]) -> Iterator[Address]:
    """An address by way of which one client reaches the other, whose answers are changed: the bytes from an offset on;
    None cuts the connection.
    """

    def forward(near: socket.socket, far: socket.socket, change: Callable[[int, bytearray], bytearray | None]) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while (some := bytearray(near.recv(1 << 16))) and (changed := change(seen, some)) is not None:
                seen += len(some)
                far.sendall(changed)
        for one in (near, far):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def relay() -> None:
            near, _ = listener.accept()
            far = socket.create_connection((address.host, address.port))
            stack.enter_context(near)
            stack.enter_context(far)
            for one in (
                threading.Thread(target=forward, args=(near, far, lambda _, some: some), daemon=True),
                threading.Thread(target=forward, args=(far, near, change), daemon=True),
            ):
                one.start()

        threading.Thread(target=relay, daemon=True).start()
        yield replace(address, port=listener.getsockname()[1])


def test_a_bit_that_flips_on_the_way_is_found(served: tuple[OuterSource, Address]) -> None:
    flipped = threading.Event()

    def flip(seen: int, some: bytearray) -> bytearray:
        if 0 <= 1_500_000 - seen < len(some):
            some[1_500_000 - seen] ^= 1
            flipped.set()
        return some

    with relayed(served[1], flip) as address:
        fetch = fetched(address)
    assert flipped.is_set()
    assert not fetch.is_complete
    assert "damaged" in fetch.failure


def test_a_fetch_goes_on_where_a_broken_one_has_ended(served: tuple[OuterSource, Address]) -> None:
    """Else a link that breaks sooner than a message takes would never carry one."""
    with relayed(served[1], lambda seen, some: some if seen < 2_500_000 else None) as address:
        broken = fetched(address)
    assert (broken.is_complete, broken.num_fetched) == (False, 2 * 2**20)
    sent: list[int] = []
    with relayed(served[1], lambda _, some: sent.append(len(some)) or some) as address:  # type: ignore[func-returns-value]
        fetch = fetched(address, failed=broken)
    assert (fetch.is_complete, fetch.num_fetched) == (True, len(CONTENT))
    assert torch.equal(fetch.contents[0], CONTENT)
    assert sum(sent) < 2 * 2**20
