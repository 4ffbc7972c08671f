"""Scaling experiments: which points there are, what they cost, and running them one after another or side by side."""
