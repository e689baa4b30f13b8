"""The `spare` commands. Each imports what it needs when it runs."""
