"""DeepSpeed's ZeRO engine: optimizer groups, gradients, precision, learning rate.

The pipeline around it belongs to this project.
"""
