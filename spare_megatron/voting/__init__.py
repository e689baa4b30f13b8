"""A group's vote on an attempt, the relays that carry it, and the log that it follows. Start with `agreement`."""
