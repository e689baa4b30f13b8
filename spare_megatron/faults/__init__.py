"""Faults to inject: drawn from a seed, and carried out in the process they strike.

Imports `stacking`, `core` and `config`.
Start with `trace`; `injection` carries faults out.
"""
