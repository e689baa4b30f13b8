"""Ranks that lack a resource when they build their communicators again: for `start_run`."""

import errno
import os
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from spare_megatron.comm.communicators import CrossGroupCommunicator
from spare_megatron.process.specs import RankSpec
from spare_megatron.rank import assembly, rank


def run_short_rank(short: frozenset[tuple[int, int]], num_failures: int, spec: RankSpec, reports: Connection) -> None:
    """Of the ranks `short` (group and rank) so many builds after the first fail at once, for want of open files."""
    left = num_failures if (spec.group, spec.rank) in short else 0

    class Short(CrossGroupCommunicator):
        def _construct(self, build: Any, size: int, name: str, *rest: Any) -> Any:
            nonlocal left
            if "/-1/" in name or not left:
                return super()._construct(build, size, name, *rest)
            left -= 1
            return OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    assembly.CrossGroupCommunicator = Short  # type: ignore[misc]
    rank.run_rank(spec, reports)


def short_ranks(*short: tuple[int, int], num_failures: int) -> Any:
    """For `start_run`."""
    return partial(run_short_rank, frozenset(short), num_failures)
