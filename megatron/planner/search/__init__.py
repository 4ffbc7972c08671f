"""Search for the best layout of a model on a machine. Only tracing imports torch (trace.py)."""
