"""When, by whom and what is saved, and which saves are valid. Pure. Start with `checkpoint_policy`."""
