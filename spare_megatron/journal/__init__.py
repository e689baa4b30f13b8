"""The history of a run: append-only records, and what can be proven from them."""
