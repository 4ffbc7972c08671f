"""Measure the machine at hand, and write what was found as the description of a cluster
(planner/cluster.py).
"""
