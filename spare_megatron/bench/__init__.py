"""Measures training on this machine, beside plain Megatron."""
