"""Fused kernels of this machine, and the torch operators over them."""
