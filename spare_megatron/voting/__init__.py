"""A group's vote on an attempt, the relays that carry it, and the log that it follows.

Imports `process`, `store` and the rooms above them. Start with `agreement`; `log_follower` builds the controller.
"""
