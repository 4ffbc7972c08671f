"""Contents of checkpoints and data sets, checks of them, and differences of two checkpoints."""
