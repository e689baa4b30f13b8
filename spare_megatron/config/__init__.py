"""The settings of a run: schema, presets, overrides, resolved form, and the program's file. Start with `schema`."""
