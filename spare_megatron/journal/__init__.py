"""The run journal: record types, its files, and the proof that a run kept its invariant.

Reads only a run directory; imports `stacking` alone and folds the decision log independently of `core`.
Start with `records`, then `fold` and `check`.
"""
