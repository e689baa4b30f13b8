"""The configuration of a run: its schema, presets and overrides, and what is wrong with it."""
