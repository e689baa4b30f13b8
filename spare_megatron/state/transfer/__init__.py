"""State that one group reads from another, and digests of state."""
