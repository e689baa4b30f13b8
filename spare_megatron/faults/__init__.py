"""Faults to inject: what they are, decided from a seed, and the injection itself."""
