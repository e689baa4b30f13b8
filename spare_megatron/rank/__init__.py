"""A rank's process: bootstrap, the training loop, reduction attempts, rejoin and restart.

Imports every room above it but `planner`, `observe` and `simulator`. Start with `train`, then `step_executor`.
"""
