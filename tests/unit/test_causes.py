"""What a rank's end says of it, and of others that may meet the same."""

import pytest
import torch

from spare_megatron.machine.gpus.device_errors import (
    FAILED_DEVICE,
    TABLE,
    DeviceError,
    code_of,
    ends_process,
    find_device_error,
    is_ambiguous,
)
from spare_megatron.process.reports import ExitCode
from spare_megatron.supervisor.rank_exits import INJECTED, Consequence, cause_of_end, consequence_of, with_xid_events

_ADVICE = """CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
_FRAMES = """Traceback (most recent call last):
  File "rank.py", line 10, in run
    train()
  File "train.py", line 20, in train
    compute()
    ~~~~~~~^^
"""


@pytest.mark.parametrize(
    ("text", "may_be_met_by_others"),
    [
        ("ValueError: index 7 is out of range", True),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered\n" + _ADVICE, True),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n" + _ADVICE, False),
        (f"{INJECTED}: raised on purpose", False),
    ],
)
def test_the_reason_is_the_exception_and_no_advice(text: str, may_be_met_by_others: bool) -> None:
    first = text.splitlines()[0]
    assert cause_of_end(ExitCode.RAISED, _FRAMES + text) == (first, first if may_be_met_by_others else "")


def test_of_several_lines_the_last_one_is_what_others_may_meet_too() -> None:
    text = f"{_FRAMES}UnsoundGradient: norm nan, median before 0\nthe gradient of step 1 is not finite"
    assert cause_of_end(ExitCode.RAISED, text) == ("the gradient of step 1 is not finite",) * 2


def test_of_a_chain_the_last_exception_counts() -> None:
    chain = f"{_FRAMES}KeyError: 1\n\nDuring handling of the above exception, another occurred:\n\n{_FRAMES}OSError: 2"
    assert cause_of_end(ExitCode.RAISED, chain) == ("OSError: 2", "OSError: 2")


def test_a_state_that_could_not_be_copied_is_explained_and_is_nothing_that_others_may_meet() -> None:
    text = "group 0 has not given its state: [Errno 24] Too many open files"
    assert cause_of_end(ExitCode.JOIN_FAILED, text) == (f"could not copy the state: {text}", "")
    assert cause_of_end(ExitCode.JOIN_FAILED) == ("could not copy the state", "")


def test_without_a_traceback_the_exit_code_is_the_reason() -> None:
    assert cause_of_end(-9) == ("SIGKILL", "")
    assert cause_of_end(ExitCode.GROUP_BROKEN) == ("lost a peer in its group", "")


LAUNCH = "CUDA error: unspecified launch failure"


@pytest.mark.parametrize(
    ("xids", "cause", "is_of_the_device"),
    [
        ([], LAUNCH, False),
        ([31], f"Xid 31 of GPU-aa on machine 2: {LAUNCH}", False),
        ([31, 79], f"Xid 31 of GPU-aa, Xid 79 (fallen off the bus) of GPU-aa on machine 2: {LAUNCH}", True),
        *[([xid], f"Xid {xid} ({text}) of GPU-aa on machine 2: {LAUNCH}", True) for xid, text in FAILED_DEVICE.items()],
    ],
)
def test_an_event_of_the_driver_names_gpu_and_machine_and_says_whether_others_meet_the_error(
    xids: list[int], cause: str, is_of_the_device: bool
) -> None:
    """An exception that alone would mostly be a bug."""
    assert is_ambiguous(LAUNCH)
    found = with_xid_events(LAUNCH, LAUNCH, 2, [("GPU-aa", xid) for xid in xids])
    assert found == (cause, "" if is_of_the_device else LAUNCH)


def test_a_killed_rank_and_one_that_lost_its_peer_have_the_event_as_the_cause_too() -> None:
    for code in (-9, ExitCode.GROUP_BROKEN):
        cause, error = with_xid_events(*cause_of_end(code), 0, [("GPU-aa", 48)])
        assert cause.startswith("Xid 48 (uncorrectable memory error) of GPU-aa on machine 0: ")
        assert not error
    broken = cause_of_end(ExitCode.GROUP_BROKEN)
    assert with_xid_events(*broken, 0, [("GPU-aa", 45)]) == broken, "another machine of the group is at fault"
    fenced = cause_of_end(ExitCode.FENCED)
    assert with_xid_events(*fenced, 0, [("GPU-aa", 48)]) == fenced, "the entry of the log has the reason"


@pytest.mark.parametrize(
    ("code", "is_group_lost", "is_store_given_up", "expected"),
    [
        (-9, False, False, Consequence.GROUP_LOST),
        (ExitCode.RAISED, False, False, Consequence.GROUP_LOST),
        (ExitCode.GROUP_BROKEN, True, False, Consequence.NONE),
        (-9, False, True, Consequence.NONE),
        (ExitCode.STORE_LOST, False, False, Consequence.GROUP_LOST_LATER),
        (ExitCode.STORE_LOST, False, True, Consequence.NONE),
        (ExitCode.RESTART, False, False, Consequence.RUN_RESTARTS),
        (ExitCode.RESTART, True, False, Consequence.NONE),
        (ExitCode.FINISHED, True, True, Consequence.RUN_ENDS),
        (ExitCode.WIPE_OUT, False, False, Consequence.RUN_ENDS),
        (ExitCode.HALTED, False, False, Consequence.RUN_ENDS),
    ],
)
def test_what_follows_from_an_exit_depends_on_its_code_and_on_what_is_lost_already(
    code: int, is_group_lost: bool, is_store_given_up: bool, expected: Consequence
) -> None:
    found = consequence_of(code, is_group_lost=is_group_lost, is_store_given_up=is_store_given_up)
    assert found is expected


@pytest.mark.parametrize(
    ("row", "of"),
    [(row, of) for row in TABLE for of in ("code", "text") if row.code is not None or of == "text"],
    ids=str,
)
def test_each_error_of_the_table_is_known_by_its_code_and_by_its_text(row: DeviceError, of: str) -> None:
    text = f"CUDA error: {row.text.capitalize() if of == 'text' else 'in another language'}"
    code = row.code if of == "code" else None
    assert find_device_error(text, code) is row
    cause, error = cause_of_end(ExitCode.RAISED, f"torch.AcceleratorError: {text}", code)
    assert error == ("" if row.kind == "certain" else f"torch.AcceleratorError: {text}")
    assert cause == f"torch.AcceleratorError: {text}" + (f" (cudaError {code})" if code else "")


@pytest.mark.parametrize(
    ("text", "kind", "is_sticky"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "certain", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "certain", True),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "certain", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "certain", False),
        ("No CUDA-capable device is detected", "certain", False),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "certain", False),
        ("CUDA error: an illegal memory access was encountered", "ambiguous", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`", "ambiguous", False),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "ambiguous", False),
        ("CUDA error: device-side assert triggered", "program", True),
    ],
)
def test_messages_of_cuda_and_its_libraries_are_distinguished(text: str, kind: str, is_sticky: bool) -> None:
    row = find_device_error(text)
    assert row is not None
    assert row.kind == kind
    assert ends_process(RuntimeError(text)) is is_sticky
    assert is_ambiguous(text) is (kind == "ambiguous")


def test_torch_gives_the_code_of_an_error_of_the_device() -> None:
    error = torch.AcceleratorError("CUDA error: in another language")
    assert code_of(error) is None
    error.error_code = 719
    assert code_of(error) == 719
    assert ends_process(error)
    assert not ends_process(RuntimeError("connection closed by peer"))
