"""Stacked optimizer state on a rank: gathers parameters, copies partitions."""
