"""Sums over the groups: communicators, NCCL, buckets, attempts."""
