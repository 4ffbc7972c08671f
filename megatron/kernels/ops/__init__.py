"""The fused operators: kernels if the device has a library, otherwise torch's own operators."""
