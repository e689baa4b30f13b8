"""What ranks of several sites read from each other, over real sockets."""

import contextlib
import socket
import threading
from collections.abc import Iterator
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


def fetched(address: Address, *, number: int = 7, size: int = len(CONTENT)) -> Fetch:
    fetch = Fetch(SiteContent("differences", number, {0: str(address)}), {0: size}, 5.0)
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


def test_a_bit_that_flips_on_the_way_is_found(served: tuple[OuterSource, Address]) -> None:
    flipped = threading.Event()

    def forward(near: socket.socket, far: socket.socket, flip_at: int) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while some := bytearray(near.recv(1 << 16)):
                if 0 <= flip_at - seen < len(some):
                    some[flip_at - seen] ^= 1
                    flipped.set()
                seen += len(some)
                far.sendall(some)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        port: int = listener.getsockname()[1]

        def relay() -> None:
            near, _ = listener.accept()
            far = socket.create_connection((served[1].host, served[1].port))
            stack.enter_context(near)
            stack.enter_context(far)
            for one in (
                threading.Thread(target=forward, args=(near, far, -1), daemon=True),
                threading.Thread(target=forward, args=(far, near, 1_500_000), daemon=True),
            ):
                one.start()

        threading.Thread(target=relay, daemon=True).start()
        fetch = fetched(replace(served[1], port=port))
    assert flipped.is_set()
    assert not fetch.is_complete
    assert "damaged" in fetch.failure
