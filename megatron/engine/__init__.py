"""DeepSpeed's ZeRO engine: optimizer groups, gradients, precision, learning rate.

The pipeline around it is this project's own.
"""
