"""What runs around a training: trials and experiments, checks of job scripts and of nodes, reports."""
