"""Fused kernels of this machine, and torch operators that call them."""
