"""The `spare` commands that start, watch, change and check runs; each imports what it needs when it runs."""
