"""Conversion of texts to token files. Runs before training, on a login node, without torch."""
