"""DeepSpeed's ZeRO engine under our own pipeline: optimizer groups, gradients, precision, learning
rate.
"""
