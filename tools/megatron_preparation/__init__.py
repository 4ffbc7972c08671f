"""From texts to token files: what runs before training, on a login node, without torch."""
