"""The decisions of a run: log entries, events, actions, and the controller that folds the log. Pure.

Start with `controller`, then `entries`, `events` and `actions`.
"""
