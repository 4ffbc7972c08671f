"""Launch, rendezvous, topology, collectives, keyed random numbers and parameter sharding."""
