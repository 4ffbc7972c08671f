"""The ZeRO engine: gradients, weights, precision, and the optimizer with its state.

DeepSpeed's engine calls the optimizer's step; everything else belongs to this project.
"""
