"""The decision log: entries and their fold, votes, events and actions. Pure. Start with `entries` and `membership`."""
