"""Megatron's model, kernels, process groups and pipeline, the program's step, and the samples."""
