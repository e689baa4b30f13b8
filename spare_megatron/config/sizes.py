"""Sizes of what machines have, as their tools tell them."""


def gib(num_bytes: float) -> str:
    """A size with three digits.

    >>> [gib(size) for size in (100, 5e5, 3 * 2**30)]
    ['100 B', '488 KiB', '3 GiB']
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
