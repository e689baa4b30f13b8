"""Where a figure comes from: machine, commit and date, to stand beside it."""

import time

from spare_megatron.tools.bench.bench import describe_machine
from spare_megatron.version import commit

_COMMIT = commit(num_digits=7)
"""As this is imported: the checkout may be another one when a benchmark ends."""


def origin() -> dict[str, str]:
    """Machine, commit and date."""
    return {"machine": describe_machine(), "commit": _COMMIT, "date": time.strftime("%Y-%m-%d")}
