"""The decision log: entries, votes, events and actions. Pure.

Start with `entries`, `events` and `actions`.
"""
