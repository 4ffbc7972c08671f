"""Which fused kernels this machine has, and the torch operators over them."""
