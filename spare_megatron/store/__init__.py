"""The control store: interface, TCPStore, etcd, and the client of the decision log.

Imports `config`; torch only inside `tcp_store`.
Start with `interface` and `decision_log`.
"""
