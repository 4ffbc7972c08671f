"""Finding the best layout by running trials: what varies, what is tried next, what came of it. Needs no torch."""
