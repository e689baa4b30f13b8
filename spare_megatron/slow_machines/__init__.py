"""Measures and examines machines, and drains the slow ones, as `core.slow_machines` decides."""
