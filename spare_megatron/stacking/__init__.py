"""Placement of data shards and optimizer-state partitions on groups, and assignment of work to them. Pure.

Start with `placement`, then `reorder` and `plans`.
"""
