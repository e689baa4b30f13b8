"""Who hosts which shard and which part of the optimizer state, and who computes what.

Pure functions of ids and counts; imports nothing of ours.
Start with `placement`, then `reorder` and `plans`.
"""
