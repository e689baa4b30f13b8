"""Copies of the state in the memory of nodes.

Same imports as `state`. Start with `snapshotter`; `snapshot_server` holds the copies.
"""
