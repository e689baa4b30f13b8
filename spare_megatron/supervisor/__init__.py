"""A node's supervisor: starts ranks, watches them, fences their groups, starts replacements.

Start with `supervisor`; `remote_supervisor` represents one on another machine to the driver.
"""
