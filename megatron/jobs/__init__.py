"""Jobs around training runs: trials, experiments, scaling reports, checks of jobs and nodes."""
