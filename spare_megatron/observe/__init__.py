"""What people see of a run: the report, its live page, traces, and metrics sinks.

Imports `journal` alone.
Start with `page` for the report, `metrics` for TensorBoard and Weights & Biases.
"""
