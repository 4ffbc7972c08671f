"""Measured runs, read from their metrics files or logs, checked, compared and drawn."""
