"""What a mistyped name was probably meant to be."""

from collections.abc import Collection
from difflib import get_close_matches

_LEAST_LIKENESS = 0.65
"""Of two names, as difflib has it: a letter or a word too few or too many, not another name."""


def nearest(name: str, valid: Collection[str]) -> str | None:
    """The valid name that is near this one; of dotted names one of the same table, whose own name may be mistyped.

    >>> valid = ["name", "spare.redundancy", "train.steps"]
    >>> [nearest(key, valid) for key in ("spare.redundency", "trian.steps", "spare.name")]
    ['spare.redundancy', 'train.steps', None]
    """
    table, _, last = name.rpartition(".")
    split = [key.rpartition(".") for key in valid]
    table = _near(table, {other for other, _, _ in split}) or table
    found = _near(last, [key for other, _, key in split if other == table])
    return f"{table}.{found}" if table and found else found


def advice(name: str, valid: Collection[str]) -> str:
    """The end of a message that a name is not valid: which one is near, or else which there are.

    >>> valid = ["name", "optimizer.redundancy", "optimizer.eps", "spare.redundancy"]
    >>> [advice(key, valid) for key in ("optimizer.name", "redundancy")]
    ['[optimizer] has redundancy, eps', 'its table is missing: optimizer.redundancy or spare.redundancy']
    """
    if found := nearest(name, valid):
        return f"the nearest valid one is {found}"
    table = name.rpartition(".")[0]
    if not table and (same := [key for key in valid if key.endswith(f".{name}")]):
        return f"its table is missing: {' or '.join(same)}"
    if table and (names := [key.rpartition(".")[2] for key in valid if key.rpartition(".")[0] == table]):
        return f"[{table}] has {', '.join(names)}"
    return f"there are {', '.join(dict.fromkeys(key.partition('.')[0] for key in valid))}"


def _near(name: str, valid: Collection[str]) -> str | None:
    return next(iter(get_close_matches(name, sorted(valid), 1, _LEAST_LIKENESS)), None)
