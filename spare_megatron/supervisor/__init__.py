"""A node's supervisor: starts ranks, watches them, fences their groups, starts replacements.

Imports `voting`, `state`, `process` and the rooms above them.
Start with `supervisor`; `remote_supervisor` represents one on another machine to the driver.
"""
