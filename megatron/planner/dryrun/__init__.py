"""A training step without a device: the run's own code on tensors without data, one rank of each
kind.
"""
