"""What can be known before a job and read off after it: machines, placement, experiments, scaling
reports.
"""
