"""The journal of a run: records, their files, and the history that they tell.

Reads only a run directory. Start with `records`, then `fold`.
"""
