"""Launch, topology, collectives with gradients, random streams and parameter sharding."""
