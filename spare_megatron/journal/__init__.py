"""The journal of a run: records, their files, and the history that they tell.

Reads only a run directory, and folds the decision log independently of `core`. Start with `records`, then `fold`.
"""
