"""The ZeRO engine: gradients, optimizer groups, precision and learning rate.

DeepSpeed's engine runs the optimizer's step; everything else belongs to this project.
"""
