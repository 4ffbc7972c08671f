"""Dry run: a training step of one rank of each kind, on tensors without data."""
