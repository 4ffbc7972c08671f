"""What checkpoints and data sets hold, whether they are whole, and how two checkpoints differ."""
