"""The configuration of a run: schema, presets, overrides, and what is wrong with it.

Loads without torch; imports `stacking` and `core`.
Start with `schema`; `validate` collects all problems.
"""
