"""The fused operators: kernels if a library was built for the device, torch's own operators if
not.
"""
