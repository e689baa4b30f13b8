"""Limits of processes that a run exceeds: refused before any process starts, with the value to set."""

import multiprocessing.util
import os
import tempfile
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.checks.validate import MachineResources, ProcessLimits, limit_problems, open_files_needed
from spare_megatron.config.schema import ClusterConfig, ControlConfig, LayoutConfig, RunConfig
from spare_megatron.driver import run
from spare_megatron.process.shortages import process_limits

ENOUGH = ProcessLimits(open_files=1 << 20, open_files_most=1 << 20)
GIB = 2**30


def config_of(num_groups: int = 4, pipeline: int = 1, launcher: str = "local", store: str = "embedded") -> RunConfig:
    return RunConfig(
        layout=LayoutConfig(num_groups=num_groups, pipeline_parallel=pipeline),
        cluster=ClusterConfig(device="cpu", launcher=launcher, num_nodes=num_groups if launcher != "local" else 1),  # type: ignore[arg-type]
        control=ControlConfig(store=store),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (
            replace(ENOUGH, open_files=64),
            "64 files open, and the processes of 4 groups need 276; raise it by `ulimit -n 2",
        ),
        (replace(ENOUGH, open_files=64, open_files_most=64), "limits.conf, as root, and `ulimit -n 276`"),
        (
            replace(ENOUGH, address_space_bytes=GIB),
            "1 GiB of address space, and a rank needs 2.75 GiB; raise it by `u",
        ),
        (replace(ENOUGH, file_bytes=20 << 10), "files of 20.5 kB, and a run needs 1.09 GB; raise it by `ulimit -f unl"),
        (replace(ENOUGH, temp_folder="/" + "t" * 75), "has 76 bytes, and a socket in it may have 75: set TMPDIR"),
    ],
)
def test_a_limit_that_is_exceeded_is_named_with_the_value_and_the_command(limits: ProcessLimits, named: str) -> None:
    [problem] = limit_problems(config_of(), limits, rank_bytes=GIB)
    assert named in problem


def test_processes_within_their_limits_are_no_problem() -> None:
    limits = ProcessLimits(open_files=276, open_files_most=276, address_space_bytes=3 * GIB, temp_folder="/" + "t" * 74)
    assert list(limit_problems(config_of(), limits, rank_bytes=GIB)) == []
    assert list(limit_problems(config_of(), replace(limits, address_space_bytes=1), rank_bytes=0)) == []


@given(
    st.integers(2, 400), st.integers(1, 8), st.sampled_from(["local", "hand"]), st.sampled_from(["embedded", "etcd"])
)
def test_more_ranks_never_need_fewer_files_and_what_was_measured_is_enough(
    num_groups: int, pipeline: int, launcher: str, store: str
) -> None:
    """Measured on one machine: a rank has 40 files, one for each group, and 5 for each rank that started before it."""
    config = config_of(num_groups, pipeline, launcher, store)
    num_here = num_groups * pipeline if launcher == "local" else pipeline
    assert open_files_needed(config) >= 40 + num_groups + 5 * num_here
    assert open_files_needed(config_of(num_groups + 1, pipeline, launcher, store)) >= open_files_needed(config)


def test_the_longest_folder_of_temporary_files_is_one_in_which_python_can_open_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts what Python adds, of which it is no part of the interface how much."""
    folder = "/tmp/" + "t" * 70
    assert list(limit_problems(config_of(), replace(ENOUGH, temp_folder=folder))) == []
    inside = os.path.join(tempfile.mkdtemp(prefix="pymp-", dir=tmp_path), "listener-")
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: os.path.dirname(inside))
    added = len(connection.arbitrary_address("AF_UNIX")) - len(str(tmp_path))
    assert len(folder) + added == 107


def test_a_run_beyond_the_limits_is_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(process_limits(), open_files=64, open_files_most=64)
    machine = MachineResources(num_gpus=0, num_cores=2, has_corpus=True, limits=limits)
    monkeypatch.setattr(run, "look_at_machine", lambda config, on_read: machine)
    monkeypatch.setattr(run, "resolved", lambda config, machine: config)
    with pytest.raises(ValueError, match=r"^a process may have 64 files open, [^\n]*`ulimit -n 276`[^\n]*$"):
        run.start_run(config_of(), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()
