"""This machine through its kernel and drivers: GPUs, load, quota, network, signals, locks, timers."""
