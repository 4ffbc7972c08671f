"""The fused operators: kernels where a library was built for the device, torch's own operators where not."""
