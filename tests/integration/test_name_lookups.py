"""Whom connections to the embedded store ask for host names: a fake name server counts."""

import ctypes
import multiprocessing
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest

TIMEOUT = timedelta(seconds=60)


class _Resolver(ctypes.Structure):
    """Of glibc, for each thread: the beginning of `struct __res_state`, with the first of its name servers."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("num_servers", ctypes.c_int),
        ("family", ctypes.c_uint16),
        ("port", ctypes.c_uint16),
        ("address", ctypes.c_uint8 * 4),
    )


def _ask_fake_server(port: int) -> _Resolver:
    """Has this thread ask only there, for a second."""
    libc = ctypes.CDLL(None)
    libc.__res_init()
    libc.__res_state.restype = ctypes.POINTER(_Resolver)
    state: _Resolver = libc.__res_state().contents
    state.retrans = state.retry = state.num_servers = 1
    state.family, state.port, state.address[:] = socket.AF_INET, socket.htons(port), (127, 0, 0, 1)
    return state


def _connect_as_torch_does(port: int) -> None:
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    _ask_fake_server(port)
    dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _serve(port: int) -> None:
    """The server's process: neither its own connection nor any that it accepts is looked up, also by other threads."""
    import torch.distributed as dist

    from spare_megatron.store.tcp_store import listen

    state = _ask_fake_server(port)
    store = listen("127.0.0.1", TIMEOUT)
    dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    assert (state.retry, socket.ntohs(state.port)) == (1, port), "as it was"


def _meet(port: int) -> None:
    """A rank's: each recovery is a rendezvous on a connection of its own."""
    from spare_megatron.store.tcp_store import TcpControlStore, serve

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=("127.0.0.1", 0, theirs), daemon=True)
    server.start()
    client = TcpControlStore("127.0.0.1", ours.recv())
    state = _ask_fake_server(port)
    for index in range(3):
        client.rendezvous(f"communicator/{index}", 0, TIMEOUT.total_seconds())
    assert (state.retry, socket.ntohs(state.port)) == (1, port), "as it was"
    server.kill()
    server.join()


@pytest.mark.parametrize(("connect", "asks"), [(_connect_as_torch_does, True), (_serve, False), (_meet, False)])
def test_no_name_server_is_asked(connect: Callable[[int], None], asks: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as run_remote_supervisor:
        run_remote_supervisor.bind(("127.0.0.1", 0))
        run_remote_supervisor.setblocking(False)
        process = multiprocessing.get_context("forkserver").Process(
            target=connect, args=(run_remote_supervisor.getsockname()[1],)
        )
        process.start()
        process.join(2 * TIMEOUT.total_seconds())
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode == 0
        try:
            question = run_remote_supervisor.recv(1024)
        except BlockingIOError:
            question = b""
    assert bool(question) == asks
