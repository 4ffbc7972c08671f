"""What checkpoints hold, whether they are whole, and how two differ."""
