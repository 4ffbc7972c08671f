"""What runs around a training: trials and points of experiments on one runner, reports, checks of
jobs and of nodes.
"""
