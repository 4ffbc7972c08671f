"""megatron-core's data sets and indices, in a process of its own: its package is named as ours.

    python core_peer.py FOLDER < jobs.json > results.json

FOLDER is where megatron-core was installed with `pip install --no-deps --target FOLDER`. A job is
one of {"write": prefix, "dtype", "documents"}, {"merge": prefix, "dtype", "inputs"}, {"read":
prefix, "mmap"}, {"order": {"sizes", "start", "stop", "num_samples", "seq_length", "seed"}}, {"blend":
{"weights", "size"}} and {"run": {"blend", "split", "samples", "seq_length", "seed", "cache"}}; a
result is null, the data read, or a digest: of the arrays, or of the samples of each split of a run.
"""

import hashlib
import json
import logging
import sys
import types
from pathlib import Path

import numpy


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
    import torch

    builder = core.IndexedDatasetBuilder(job["write"] + ".bin", getattr(numpy, job["dtype"]))
    for number, document in enumerate(job["documents"]):
        if number % 2:
            joined = torch.tensor([token for sequence in document for token in sequence])
            builder.add_document(joined, [len(sequence) for sequence in document])
            continue
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(job["write"] + ".idx")


def merge(core, job):
    builder = core.IndexedDatasetBuilder(job["merge"] + ".bin", getattr(numpy, job["dtype"]))
    for prefix in job["inputs"]:
        builder.add_index(prefix)
    builder.finalize(job["merge"] + ".idx")


def read(core, job):
    dataset = core.IndexedDataset(job["read"], mmap=job["mmap"])
    return {
        "dtype": dataset.index.dtype.__name__,
        "sequences": [dataset[i].tolist() for i in range(len(dataset))],
        "lengths": dataset.sequence_lengths.tolist(),
        "document_indices": dataset.document_indices.tolist(),
    }


def digest(arrays):
    content = b"".join(numpy.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(content).hexdigest()[:32]


def order(core, job):
    """Build the document, sample and shuffle index of one split, all that its data set reads set."""
    from megatron.core.datasets import gpt_dataset

    case = job["order"]
    split = gpt_dataset.GPTDataset.__new__(gpt_dataset.GPTDataset)
    split.config = gpt_dataset.GPTDatasetConfig.__new__(gpt_dataset.GPTDatasetConfig)
    vars(split.config).update(
        sequence_length=case["seq_length"],
        random_seed=case["seed"],
        add_extra_token_to_sequence=True,
        drop_last_partial_validation_sequence=True,
        defer_npy_index_mmap=False,
        path_to_cache=None,
        mock=True,
    )
    split.dataset = types.SimpleNamespace(sequence_lengths=numpy.array(case["sizes"], numpy.int32))
    split.indices = numpy.arange(case["start"], case["stop"], dtype=numpy.int32)
    split.num_samples = case["num_samples"]
    split.index_split = gpt_dataset.Split.train
    return digest(split._build_document_sample_shuffle_indices())


def blend(core, job):
    from megatron.core.datasets import helpers

    size = job["blend"]["size"]
    weights = numpy.array(job["blend"]["weights"])
    which = numpy.zeros(size, numpy.int16)
    number = numpy.zeros(size, numpy.int64)
    helpers.build_blending_indices(which, number, weights, len(weights), size, False)
    return digest([which, number])


def run(core, job):
    """Build the three data sets of a run with megatron-core's own builder."""
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset
    from torch import distributed

    if not distributed.is_initialized():  # a blend asks for the rank
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    case = job["run"]
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=case["blend"],
        split=case["split"],
        path_to_cache=case["cache"],
        tokenizer=types.SimpleNamespace(vocab_size=9999, eod=9998, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, case["samples"], lambda: True, config
    )
    samples = [
        [(dataset[n]["tokens"].numpy(), dataset[n]["labels"][-1:].numpy()) for n in range(count)]
        for dataset, count in zip(builder.build(), case["samples"], strict=True)
    ]
    return [digest([part for sample in split for part in sample]) for split in samples]


def main():
    core = import_core(sys.argv[1])
    logging.disable(logging.WARNING)  # "Unable to save" for every index
    actions = {action.__name__: action for action in (write, merge, read, order, blend, run)}
    json.dump([actions[next(iter(job))](core, job) for job in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
