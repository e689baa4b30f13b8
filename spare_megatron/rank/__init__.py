"""A rank's process: bootstrap, the training loop, reduction attempts, rejoin and restart.

Start with `train`, then `step_executor`.
"""
