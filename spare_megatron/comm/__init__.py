"""Communicators across groups, rebuilt in place, and the sums over them.

Imports `store`, `mcore` and what they need.
Start with `communicators`, then `bucket_exchange`; `nccl` has every NCCL setting.
"""
