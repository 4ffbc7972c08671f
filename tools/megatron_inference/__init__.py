"""Inference with a trained model, on any layout."""
