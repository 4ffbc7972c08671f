"""Fused kernels for this machine, and torch operators that call them."""
