"""`spare bench`: throughput, beside plain Megatron."""
