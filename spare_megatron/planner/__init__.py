"""Closed forms for redundancy and cadence, and the plan that trains fastest.

Imports `stacking` and `core`.
Start with `plan`; `forecast` combines everything that can be lost.
"""
