"""Which files of a snapshot server a rank keeps mapped, and what of them is registered with CUDA, by a stand-in."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spare_megatron.process.snapshot_wire import Part
from spare_megatron.stacking.layout import PartitionId
from spare_megatron.state.snapshot import mapped_files
from spare_megatron.state.snapshot.mapped_files import MappedFiles
from tests.cudart_stand_in import NOT_SUPPORTED, CudartStandIn

PAGE = 4096
REST, ZERO = Part(0), Part(0, PartitionId(0))

MakeFile = Callable[[int], int]


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "RANGE_BYTES", 4 * PAGE)


@pytest.fixture
def make_file() -> Iterator[MakeFile]:
    """Makes memory files; their descriptors, as a rank gets them, are closed at the end."""
    made: list[int] = []

    def make(num_bytes: int) -> int:
        made.append(os.memfd_create("spare-mapped"))
        os.truncate(made[-1], num_bytes)
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


def num_mapped() -> int:
    return sum("memfd:spare-mapped" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_two_files_in_turn_are_mapped_and_registered_once(make_file: MakeFile) -> None:
    cudart, fds = CudartStandIn(), [make_file(10 * PAGE), make_file(10 * PAGE)]
    mapped = MappedFiles(cudart)
    for turn in range(6):
        # Another descriptor each time, as the server sends it.
        fd = os.dup(fds[turn % 2])
        file = mapped.map(REST, fd)
        os.close(fd)
        assert (file.range_bytes is None) == (turn < 2), "the first copy goes through buffers"
        mapped.register()
        assert file.range_bytes == 4 * PAGE
        assert mapped.registered_bytes == min(turn + 1, 2) * 10 * PAGE
    assert cudart.calls == 2 * 3
    assert sorted(cudart.registered.values()) == 2 * [2 * PAGE] + 4 * [4 * PAGE]
    assert num_mapped() == 2


def test_what_is_written_to_a_mapping_is_in_the_file(make_file: MakeFile) -> None:
    fd = make_file(PAGE)
    MappedFiles(None).map(REST, fd).memory[:5] = b"state"
    assert os.pread(fd, 5, 0) == b"state"


@pytest.mark.parametrize("refused", [1, 3, 4])
def test_a_refusal_leaves_a_file_to_the_buffers_and_no_part_of_it_registered(make_file: MakeFile, refused: int) -> None:
    """In its first range or a later one, of the first file or the second; nothing is tried again."""
    cudart = CudartStandIn(refuses_from=refused, refusal=NOT_SUPPORTED)
    mapped = MappedFiles(cudart)
    files = [mapped.map(REST, make_file(10 * PAGE)) for _ in range(2)]
    mapped.register()
    is_registered = [file.range_bytes is not None for file in files]
    assert is_registered == [refused > 3, False]
    assert sum(cudart.registered.values()) == mapped.registered_bytes == 10 * PAGE * is_registered[0]
    assert mapped.failure == f"cudaHostRegister of {10 * PAGE} bytes: cudaError {NOT_SUPPORTED}"
    mapped.map(ZERO, make_file(PAGE))
    mapped.register()
    assert cudart.calls == refused
    assert cudart.failed_in
    assert threading.get_ident() not in cudart.failed_in, "its next kernel would raise the error"
    mapped.keep(())
    assert cudart.registered == {}


def test_files_of_another_size_or_of_another_server_take_the_place_of_the_oldest(make_file: MakeFile) -> None:
    cudart = CudartStandIn()
    mapped = MappedFiles(cudart)
    for num_pages in (10, 10, 12, 12, 3):
        mapped.map(REST, make_file(num_pages * PAGE))
        mapped.register()
    assert mapped.registered_bytes == sum(cudart.registered.values()) == 15 * PAGE
    assert num_mapped() == 2


def test_mappings_of_parts_that_are_kept_elsewhere_are_given_up(make_file: MakeFile) -> None:
    cudart = CudartStandIn()
    mapped = MappedFiles(cudart)
    for part in (REST, REST, ZERO, ZERO):
        mapped.map(part, make_file(PAGE))
    mapped.register()
    assert mapped.registered_bytes == 4 * PAGE
    mapped.keep([ZERO])
    assert mapped.registered_bytes == sum(cudart.registered.values()) == 2 * PAGE
    mapped.keep(())
    assert cudart.registered == {}
    assert num_mapped() == 0


def test_on_a_cpu_files_are_mapped_and_nothing_is_registered(make_file: MakeFile) -> None:
    mapped = MappedFiles(None)
    file = mapped.map(REST, make_file(PAGE))
    mapped.register()
    assert (file.range_bytes, mapped.registered_bytes, mapped.failure) == (None, 0, "")
