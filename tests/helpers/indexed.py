"""Data sets of given documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import IndexedDatasetWriter


def write_documents(
    prefix: Path | str, documents: Iterable[Sequence[int]], dtype: type = np.uint16
) -> str:
    """Write a data set of these documents and return its prefix."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)
