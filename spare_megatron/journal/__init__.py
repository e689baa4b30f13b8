"""The history of a run: records, the files that hold them, and what they prove.

Reads nothing but a run's directory; imports `stacking` alone, and folds the log by itself.
Start with `records`, then `fold` and `check`.
"""
