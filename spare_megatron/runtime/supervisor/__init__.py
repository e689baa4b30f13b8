"""A node's supervisor: it starts ranks, watches them, and has the groups of lost ones fenced."""
