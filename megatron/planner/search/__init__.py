"""Search for the best layout of a model on a machine: every layout in reach is judged or provably
cannot be among the best. Needs no torch.
"""
