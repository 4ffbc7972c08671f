"""What runs around a training: trials of the tuner and points of experiments on one runner, and their reports."""
