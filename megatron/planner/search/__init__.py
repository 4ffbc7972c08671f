"""Search for the best layout of a model on a machine. Does not need torch."""
