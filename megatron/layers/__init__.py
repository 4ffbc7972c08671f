"""Transformer layers for tensor- and sequence-parallel groups, independent of data and pipeline."""
