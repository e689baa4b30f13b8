"""The control store: interface, TCPStore, etcd, and the client of the decision log.

Imports `stacking` and `config`; torch only inside `tcp_store`. Start with `interface`, `keys` and `decision_log`.
"""
