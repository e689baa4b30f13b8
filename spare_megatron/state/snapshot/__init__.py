"""Copies of the state in the memory of nodes. Start with `snapshotter`."""
