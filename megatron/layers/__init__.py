"""Layers of transformers. They do not depend on data parallelism or on pipeline stages."""
