"""megatron-core's IndexedDataset, in a process of its own: its package has the same name as ours.

    python core_peer.py FOLDER < jobs.json > results.json

FOLDER is where megatron-core was installed with `pip install --no-deps --target FOLDER`. A job is
one of {"write": prefix, "dtype", "documents", "modes"}, {"merge": prefix, "dtype", "inputs",
"multimodal"} and {"read": prefix, "mmap", "multimodal"}; a result is null, or the data read.
"""

import json
import sys
import types
from pathlib import Path


def import_core(folder):
    """Import the module without the packages' own imports.

    They take seconds and do not affect the format.
    """
    for name in ("megatron", "megatron.core"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    import megatron.core.parallel_state  # first: utils and parallel_state import each other  # noqa: F401
    from megatron.core.datasets import indexed_dataset

    # Its collections before and after each step suit indices of gigabytes; here they took most of
    # the time.
    indexed_dataset.gc.collect = lambda: 0
    return indexed_dataset


def write(core, job):
    """Write documents alternately as one tensor with lengths and sequence by sequence."""
    import numpy
    import torch

    dtype = getattr(numpy, job["dtype"])
    builder = core.IndexedDatasetBuilder(
        job["write"] + ".bin", dtype=dtype, multimodal=job["modes"] is not None
    )
    modes = iter(job["modes"] or [])
    for number, document in enumerate(job["documents"]):
        sequence_modes = [next(modes) for _ in document] if job["modes"] is not None else None
        if number % 2:
            joined = torch.tensor([token for sequence in document for token in sequence])
            builder.add_document(joined, [len(sequence) for sequence in document], sequence_modes)
            continue
        for i, sequence in enumerate(document):
            builder.add_item(
                torch.tensor(sequence), *(sequence_modes[i : i + 1] if sequence_modes else [])
            )
        builder.end_document()
    builder.finalize(job["write"] + ".idx")


def merge(core, job):
    import numpy

    dtype = getattr(numpy, job["dtype"])
    builder = core.IndexedDatasetBuilder(
        job["merge"] + ".bin", dtype=dtype, multimodal=job["multimodal"]
    )
    for prefix in job["inputs"]:
        builder.add_index(prefix)
    builder.finalize(job["merge"] + ".idx")


def read(core, job):
    dataset = core.IndexedDataset(job["read"], multimodal=job["multimodal"], mmap=job["mmap"])
    items = [dataset[i] for i in range(len(dataset))]
    return {
        "dtype": dataset.index.dtype.__name__,
        "sequences": [(item[0] if job["multimodal"] else item).tolist() for item in items],
        "modes": [int(item[1]) for item in items] if job["multimodal"] else None,
        "lengths": dataset.sequence_lengths.tolist(),
        "document_indices": dataset.document_indices.tolist(),
    }


def main():
    core = import_core(sys.argv[1])
    results = []
    for job in json.load(sys.stdin):
        action = next(
            a for name, a in (("write", write), ("merge", merge), ("read", read)) if name in job
        )
        results.append(action(core, job))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
