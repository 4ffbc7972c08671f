"""Transformer layers that are cut over tensor- and sequence-parallel groups. They know no data and
no pipeline.
"""
