"""The processes of a run: how they start, what they send each other, and how they show that they live.

Imports `store` and the rooms above it.
Start with `specs` and `reports`; formats on sockets are in the `*_wire` modules.
"""
