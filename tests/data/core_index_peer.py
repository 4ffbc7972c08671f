"""megatron-core's document, sample, shuffle and blend indices, in a process of its own.

Its package has the same name as ours.

    python core_index_peer.py FOLDER CASES OUT.npz

CASES is JSON: {"orders": [{"sizes", "start", "stop", "num_samples", "seq_length", "seed"}],
"blends": [{"weights", "size"}]}. Order i gives the arrays "doc_i", "sample_i" and "shuffle_i",
blend i "which_i" and "number_i".
"""

import json
import logging
import sys

import numpy
from core_peer import import_core


class Split:
    """Stand-in for megatron-core's data set of one split: all that its index building reads."""

    def __init__(self, gpt_dataset, case):
        self.config = gpt_dataset.GPTDatasetConfig.__new__(gpt_dataset.GPTDatasetConfig)
        settings = dict(
            sequence_length=case["seq_length"],
            random_seed=case["seed"],
            add_extra_token_to_sequence=True,
            drop_last_partial_validation_sequence=True,
            defer_npy_index_mmap=False,
            path_to_cache=None,
            mock=True,
        )
        for name, value in settings.items():
            setattr(self.config, name, value)
        self.dataset = self
        self.sequence_lengths = numpy.array(case["sizes"], numpy.int32)
        self.indices = numpy.arange(case["start"], case["stop"], dtype=numpy.int32)
        self.num_samples = case["num_samples"]
        self.index_split = gpt_dataset.Split.train
        self._gpt_dataset = gpt_dataset.GPTDataset

    def _get_num_tokens_per_epoch(self):
        return self._gpt_dataset._get_num_tokens_per_epoch(self)

    def _get_num_epochs(self, tokens):
        return self._gpt_dataset._get_num_epochs(self, tokens)

    def build(self):
        return self._gpt_dataset._build_document_sample_shuffle_indices(self)


def main():
    folder, cases, out = sys.argv[1:]
    import_core(folder)
    from megatron.core.datasets import gpt_dataset, helpers

    logging.disable(logging.WARNING)  # "Unable to save" in every case
    with open(cases) as file:
        wanted = json.load(file)
    arrays = {}
    for i, case in enumerate(wanted["orders"]):
        arrays[f"doc_{i}"], arrays[f"sample_{i}"], arrays[f"shuffle_{i}"] = Split(
            gpt_dataset, case
        ).build()
    for i, case in enumerate(wanted["blends"]):
        which, number = (
            numpy.zeros(case["size"], numpy.int16),
            numpy.zeros(case["size"], numpy.int64),
        )
        weights = numpy.array(case["weights"])
        helpers.build_blending_indices(which, number, weights, len(weights), case["size"], False)
        arrays[f"which_{i}"], arrays[f"number_{i}"] = which, number
    numpy.savez(out, **arrays)


if __name__ == "__main__":
    main()
