"""The `spare` commands; each imports what it needs when it runs.

May import every room but `stacking`, `core`, `voting` and `rank`.
Start with `main`; a command is in the module of its name.
"""
