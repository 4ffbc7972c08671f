"""Two small data sets of real text for runs that are compared: the documentation, and the program itself, as bytes."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.faults.job import ROOT

SOURCES = {"docs": "docs/*.md", "code": "megatron/training/*.py"}
VOCABULARY = ["--vocab-size", "256"]
_KILOBYTES = 40  # of each


def make_corpus(folder: Path) -> list[str]:
    """Tokenized data sets in `folder`, made where they are missing; the flags that train on a blend of them.

    A token is a byte, a document a file, so no vocabulary is needed. The text is cut to a size so that a run of some
    dozens of steps sees both sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blend: list[str] = []
    for weight, (name, pattern) in zip(("0.7", "0.3"), SOURCES.items(), strict=True):
        prefix = folder / name
        if not prefix.with_name(f"{name}_text_document.idx").exists():
            lines, left = folder / f"{name}.jsonl", _KILOBYTES * 1000
            with open(lines, "w") as out:
                for file in sorted(ROOT.glob(pattern)):
                    content = file.read_bytes()[:left]
                    left -= len(content)
                    if content:
                        out.write(json.dumps({"text": " ".join(str(byte) for byte in content)}) + "\n")
            subprocess.run(
                [sys.executable, "tools/preprocess_data.py", "--input", str(lines), "--output-prefix", str(prefix),
                 "--workers", "1", "--tokenizer-type", "NullTokenizer", *VOCABULARY, "--append-eod"],
                cwd=ROOT, check=True, capture_output=True, timeout=120,
            )  # fmt: skip
        blend += [weight, f"{prefix}_text_document"]
    return ["--data-path", *blend, "--split", "90,10,0", *VOCABULARY]
