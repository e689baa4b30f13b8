"""The control store: interface, TCPStore, etcd, and the client of the decision log. Start with `interface`."""
