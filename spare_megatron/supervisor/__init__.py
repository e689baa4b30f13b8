"""A node's supervisor: starts ranks, watches them, fences their groups, starts replacements."""
