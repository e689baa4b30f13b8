"""Which groups host the data shards and state partitions, and which compute what. Pure. Start with `placement`."""
