"""What a rank's end says of it, and of others that may meet the same."""

import pytest

from spare_megatron.process.reports import ExitCode
from spare_megatron.supervisor.rank_exits import INJECTED, Consequence, cause_of_end, consequence_of

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
