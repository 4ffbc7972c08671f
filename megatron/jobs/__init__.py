"""Jobs around a training: trials, experiments, scaling reports, checks of jobs and of nodes."""
