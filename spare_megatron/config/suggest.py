"""The valid name that a mistyped one probably meant."""

from collections.abc import Sequence
from difflib import SequenceMatcher


def nearest(name: str, valid: Sequence[str]) -> str:
    """The valid dotted name most like this one, counting the last part twice; ties go to the first in order.

    >>> nearest("spare.redundency", ["model.num_layers", "spare.redundancy"])
    'spare.redundancy'
    >>> nearest("redundancy", ["reduce.mode", "spare.redundancy"])
    'spare.redundancy'
    """

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, name, candidate).ratio()
        return whole + SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()

    return max(sorted(valid), key=likeness)
