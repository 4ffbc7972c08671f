"""The run: set-up, loop, data, checkpoints, and its end."""
