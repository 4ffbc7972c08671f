"""Dry run: training steps of one rank of each kind, on tensors without data."""
