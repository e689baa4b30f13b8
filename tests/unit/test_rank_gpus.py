"""Which GPU a rank gets: the one that it had, whatever becomes of the machine's others, and no other one in sight."""

import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.schema import ClusterConfig, LayoutConfig, RunConfig, SpareConfig
from spare_megatron.machine.gpus import ClockReader, list_file, shown_to_children
from spare_megatron.process.specs import NodeSpec, RankSpec
from spare_megatron.rank.bootstrap import refuse_lost_gpu
from spare_megatron.stacking.layout import GroupId
from spare_megatron.store.spec import TcpStoreSpec
from spare_megatron.supervisor import node_process
from spare_megatron.supervisor.rank_processes import RankProcesses
from tests.unit.curious_rank import report_seen
from tests.unit.test_gpus import DIVIDED, FOUR, Nvml, Part

TIMEOUT_S = 120.0
A, B, C, D = (gpu.uuid for gpu in FOUR)
OTHERS = [Part(f"GPU-{letter}{letter}00-0000", f"H100 {letter}") for letter in "vwxy"]

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs GPUs, and sets what a launcher shows of them."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    real = ctypes.CDLL

    def use(cards: Sequence[Part], visible: str | None = None) -> None:
        nvml = Nvml(cards)
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name, **options: nvml if name and "ml" in name else real(name, **options)
        )
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible

    yield use
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if own is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own


def spec_of(run_dir: Path, node: int = 0, launcher: Any = "hand", spares: int = 0, **layout: int) -> NodeSpec:
    cluster = ClusterConfig(device="gpu", launcher=launcher, num_nodes=2)
    config = RunConfig(
        cluster=cluster, layout=LayoutConfig(**{"num_groups": 8} | layout), spare=SpareConfig(spares=spares)
    )
    store = TcpStoreSpec(host="127.0.0.1", port=1)
    return NodeSpec(config=config, run_dir=run_dir, node=node, store=store, faults=(), rank_main=report_seen)


def kept(run_dir: Path, node: int = 0) -> list[str]:
    return list_file(run_dir, node).read_text().split()


def test_a_gpu_that_falls_off_the_bus_shifts_no_other(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the machine had started again, the ranks above trained on the GPUs of others."""
    spec = spec_of(tmp_path, node=1)
    install(FOUR)
    assert node_process._keep_gpus(spec) == (A, B, C, D)
    assert kept(tmp_path, 1) == [A, B, C, D]
    assert capsys.readouterr().out == ""
    install([FOUR[0], FOUR[2], FOUR[3]])
    assert node_process._keep_gpus(spec) == (A, B, C, D)
    file = list_file(tmp_path, 1)
    assert capsys.readouterr().out == (
        f"GPU 1 of this machine is lost: the driver does not list {B}, and {file} does\n"
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"{A},{B},{C},{D}", "for what this process starts beside the ranks"
    install(FOUR)
    assert node_process._keep_gpus(spec) == (A, B, C, D), "it is back"


@pytest.mark.parametrize(
    ("first", "cards", "then", "expected"),
    [
        ("2,0", FOUR, None, (C, A)),  # the order is the launcher's, and later ones keep to the first
        ("2,0", FOUR[1:], "1,0", (C, A)),
        (f"{D},{B}", FOUR, f"{B},{D}", (D, B)),
        ("0,1,2", FOUR[1:], "0,1,2", (A, B, C)),  # a fourth that was another's is not taken
        (None, [], None, (A, B, C, D)),  # the driver is gone
        (None, OTHERS, None, tuple(gpu.uuid for gpu in OTHERS)),  # another machine
        ("0", [], None, (A,)),  # with one GPU, which is lost
    ],
)
def test_the_first_list_holds_until_the_machine_is_another(
    install: Install, tmp_path: Path, first: str | None, cards: Sequence[Part], then: str | None, expected: object
) -> None:
    spec = spec_of(tmp_path)
    install(FOUR, first)
    before = node_process._keep_gpus(spec)
    install(cards, then)
    assert node_process._keep_gpus(spec) == expected
    assert (before == expected) == (cards is not OTHERS)
    assert tuple(kept(tmp_path)) == expected


def test_a_mig_instance_is_listed_by_its_own_name(install: Install, tmp_path: Path) -> None:
    install([DIVIDED], "MIG-2200-0000")
    assert node_process._keep_gpus(spec_of(tmp_path)) == ("MIG-2200-0000",)


def test_a_list_that_cannot_be_written_is_said_and_used(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FOUR)
    list_file(tmp_path, 0).with_suffix(".tmp").mkdir(parents=True)
    assert node_process._keep_gpus(spec_of(tmp_path)) == (A, B, C, D)
    assert "cannot be written: [Errno 21] Is a directory" in capsys.readouterr().out


def started(spec: NodeSpec) -> list[tuple[str, str, str | None, list[str]]]:
    """What each rank of the node reports, in order. All processes have ended afterwards."""
    ranks = RankProcesses(spec)
    try:
        ranks.start_all()
        found = []
        for key in spec.config.parallel.ranks_on(spec.node):
            pipe = ranks.child(key).reports
            assert pipe.poll(TIMEOUT_S)
            found.append(pipe.recv())
        return found
    finally:
        ranks.end_all()


@pytest.mark.parametrize(("launcher", "gpus"), [("hand", (A, B)), ("local", (C, D))])
def test_a_rank_sees_its_gpu_alone_before_it_imports_anything(
    install: Install, tmp_path: Path, launcher: Any, gpus: tuple[str, str]
) -> None:
    """transformer-engine asks for the kind of GPU 0 as it is imported: every rank of a node had a context there."""
    install(FOUR)
    spec = spec_of(tmp_path, node=1, launcher=launcher, num_groups=4)
    spec = dataclasses.replace(spec, gpus=node_process._keep_gpus(spec))
    assert started(spec) == [(gpu, "cuda:0", gpu, []) for gpu in gpus]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"{A},{B},{C},{D}"


def test_a_machine_without_enough_gpus_shows_the_rank_none(install: Install, tmp_path: Path) -> None:
    install(FOUR)
    spec = dataclasses.replace(spec_of(tmp_path, num_groups=4), gpus=(A,))
    assert started(spec) == [(A, "cuda:0", A, []), ("", "cuda:0", "", [])]


@pytest.mark.parametrize(
    ("spares", "layout", "expected"),
    [
        (0, {}, (0, 0, 0, 0)),
        (1, {}, (1, 1, 1, 1)),  # any of four groups
        (3, {}, (1, 1, 1, 1)),  # a GPU has one
        (1, {"num_groups": 4, "pipeline_parallel": 2}, (1, 1, 1, 1)),
    ],
)
def test_spares_are_kept_for_each_gpu(
    tmp_path: Path, spares: int, layout: dict[str, int], expected: tuple[int, ...]
) -> None:
    spec = dataclasses.replace(spec_of(tmp_path, spares=spares, **layout), gpus=(A, B, C, D))
    ranks = RankProcesses(spec)
    try:
        assert tuple(ranks._num_spares()[gpu] for gpu in spec.gpus) == expected
    finally:
        ranks.end_all()


def test_a_lost_gpu_is_named_by_its_rank(install: Install, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)

    def rank(gpu: str) -> RankSpec:
        return RankSpec(
            config=spec.config,
            run_dir=tmp_path,
            group=GroupId(2),
            incarnation=1,
            rank=0,
            store=spec.store,
            faults=(),
            gpu=gpu,
        )

    install(FOUR, C)
    refuse_lost_gpu(rank(C))
    install([*FOUR[:2], FOUR[3]], C)
    with pytest.raises(RuntimeError, match=f"GPU 2 of this machine, {C}, is lost: .*nvidia-smi -L"):
        refuse_lost_gpu(rank(C))
    install(FOUR, "")
    with pytest.raises(RuntimeError, match="GPU 2 of this machine is not there: no CUDA-capable device"):
        refuse_lost_gpu(rank(""))


def test_clocks_are_those_of_the_machine_while_a_child_is_started(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads see what a child is shown; the clock of its GPU counted as that of GPU 0."""
    slow = [*FOUR[:3], Part(D, "H100 d", throttled=0x40)]
    install(slow, f"{A},{B},{C},{D}")
    clocks: Any = ClockReader()
    with shown_to_children(D):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == D
        clocks()
        clocks._thread.join(TIMEOUT_S)
    assert [bool(text) for text in clocks()] == [False, False, False, True]
    clocks._thread.join(TIMEOUT_S)
