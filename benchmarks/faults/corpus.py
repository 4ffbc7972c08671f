"""Two small data sets of real text for compared runs: documentation and sources, as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.faults.job import ROOT
from megatron.data.indexed_writer import IndexedDatasetWriter

SOURCES = {"docs": "docs/*.md", "code": "megatron/training/*/*.py"}
_END = 256  # end-of-document id, as NullTokenizer derives it from --vocab-size
_KILOBYTES = 40  # of each data set
_OF_A_FILE = 4000  # maximum bytes: a tenth of the documents is needed for validation


def make_corpus(folder: Path) -> list[str]:
    """Create missing data sets in `folder`; return the flags that train on a blend of them.

    Tokens are bytes, so no vocabulary is needed; documents are files. The text is truncated so that
    a run of a few dozen steps uses both sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blend: list[str] = []
    for weight, (name, pattern) in zip(("0.7", "0.3"), SOURCES.items(), strict=True):
        prefix = folder / name
        left = _KILOBYTES * 1000
        if not prefix.with_suffix(".idx").exists():
            with IndexedDatasetWriter(prefix, np.uint16) as writer:
                for file in sorted(ROOT.glob(pattern)):
                    content = file.read_bytes()[: min(left, _OF_A_FILE)]
                    left -= len(content)
                    if content:
                        writer.add_document([*content, _END])
        blend += [weight, str(prefix)]
    return ["--data-path", *blend, "--split", "90,10,0", "--vocab-size", str(_END)]
