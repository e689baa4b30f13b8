"""Ranks that lack a resource when they build their communicators again: for `start_run`."""

import errno
import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank
from spare_megatron.voting.agreement import GroupAgreement, GroupOpinion, RankOutcome

_POLL_S = 0.01


def run_short_rank(short: frozenset[tuple[int, int]], num_failures: int, spec: RankSpec, reports: Connection) -> None:
    """Of the ranks `short` (group and rank) so many builds after the first fail, for want of open files: at once, or
    those of other ranks than leaders when the leader of group 0 has all of its own sums.
    """
    left = num_failures if (spec.group, spec.rank) in short else 0
    summed, has_rebuilt = spec.run_dir / "summed", False

    class Agreement(GroupAgreement):
        def settle(self, outcome: RankOutcome) -> GroupOpinion:
            if (spec.group, spec.rank) == (0, 0) and has_rebuilt and outcome.is_complete:
                summed.touch()
            return super().settle(outcome)

    class Short(CrossGroupCommunicator):
        def _construct(self, build: Any, size: int, name: str, *rest: Any) -> Any:
            nonlocal left, has_rebuilt
            has_rebuilt = "/-1/" not in name
            if not has_rebuilt or not left:
                return super()._construct(build, size, name, *rest)
            left -= 1
            while spec.rank and not summed.exists():
                time.sleep(_POLL_S)
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    assembly.CrossGroupCommunicator = Short  # type: ignore[misc]
    assembly.GroupAgreement = Agreement  # type: ignore[misc]
    rank.run_rank(spec, reports)


def short_ranks(*short: tuple[int, int], num_failures: int) -> Any:
    """For `start_run`."""
    return partial(run_short_rank, frozenset(short), num_failures)
