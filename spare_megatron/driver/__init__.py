"""The process that a user starts: preflight, store, supervisors, telemetry, summary, node examination.

Imports every room above it but `planner` and `simulator`.
Start with `run`, then `driver`.
"""
