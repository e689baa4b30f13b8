"""Every decision of a run: the log's entries, events and actions, and the controller that folds them.

Pure: no clock, socket, thread or tensor; imports `stacking` alone.
Start with `controller`, then `entries`, `events` and `actions`.
"""
