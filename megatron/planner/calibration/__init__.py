"""Calibration: measure this machine, and write the results as a cluster file (cluster.py)."""
