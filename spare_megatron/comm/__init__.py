"""Communicators across groups, rebuilt in place, and the sums over them. Start with `communicators`."""
