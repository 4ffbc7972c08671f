"""Prediction of a job's memory and time: machines, placement, traces, cost models and search."""
