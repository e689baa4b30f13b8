"""Communicators across groups, rebuilt in place, and the sums over them.

Start with `communicators`, then `bucket_exchange`; `nccl` has every NCCL setting.
"""
