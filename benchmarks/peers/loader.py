"""One start of a data loader, ours or megatron-core's: its set-up, its memory, and time per sample.

    python loader.py JOB

JOB is a JSON object with the arguments of `measure`; a JSON object with the figures is printed.
"side" is the value of --data-order, or "megatron-core", whose folder must come first in PYTHONPATH.
Neither side uses threads or processes. A sample is what the data set returns for one number:
tokens in an array for us, tensors of tokens, labels, loss mask and positions for megatron-core. A
batch has all of them for both: MicroBatchStream for us, torch's DataLoader for megatron-core.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCKS = 5
FIRST = 1000  # samples
VOCABULARY = 50257
Batches = Callable[[int], Iterator[Any]]  # from a sample on


def ours(
    side: str,
    prefixes: Sequence[str],
    weights: Sequence[float],
    seq_length: int,
    samples: int,
    cache: str,
    micro_batch: int,
) -> tuple[Any, Batches]:
    from megatron.config import Config
    from megatron.data.datasets import build_datasets
    from megatron.data.sampler import MicroBatchStream, Share

    blend = [str(word) for pair in zip(weights, prefixes, strict=True) for word in pair]
    config = Config.create(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=1,
        seq_length=seq_length,
        max_position_embeddings=seq_length,
        vocab_size=VOCABULARY,
        micro_batch_size=micro_batch,
        train_samples=samples,
        lr=1e-3,
        data_path=blend,
        split="1",
        data_cache_path=cache,
        data_order=side,
    )
    dataset = build_datasets(config, samples, 0, 0).train
    assert dataset is not None, "training data were asked for"

    def batches(first: int) -> Iterator[Any]:
        stream = MicroBatchStream(dataset, Share(micro_batch), first, vocab_size=VOCABULARY)
        while True:
            yield stream.take(1)

    return dataset, batches


def megatron_cores(
    side: str,
    prefixes: Sequence[str],
    weights: Sequence[float],
    seq_length: int,
    samples: int,
    cache: str,
    micro_batch: int,
) -> tuple[Any, Batches]:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch import distributed
    from torch.utils.data import DataLoader

    if not distributed.is_initialized():  # a blend asks for the rank
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=(list(prefixes), list(weights) if len(weights) > 1 else None),
        split="1",
        path_to_cache=cache,
        tokenizer=types.SimpleNamespace(
            vocab_size=VOCABULARY, eod=VOCABULARY - 1, pad=-1, unique_identifiers={}
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    dataset = builder.build()[0]

    def batches(first: int) -> Iterator[Any]:
        numbers = range(first, samples)
        groups = (list(numbers[i : i + micro_batch]) for i in range(0, len(numbers), micro_batch))
        return iter(DataLoader(dataset, batch_sampler=groups))

    return dataset, batches


def resident(name: str) -> int:
    """Return an entry of this process's status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def measure(side: str, micro_batch: int, count: int, **job: Any) -> dict[str, Any]:
    """Return seconds and bytes of the set-up, and seconds of each sample, alone and in batches.

    Each block reads `count` samples that were not read before, from a third of the run on; FIRST
    samples before them are on their own, in `first_s`. Peak memory includes mapped pages of files;
    `own_bytes`, after all reading, is without them.
    """
    build = megatron_cores if side == "megatron-core" else ours
    # what the first use of the libraries costs is no part of the set-up
    build(side, micro_batch=micro_batch, **job | job.pop("first"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
    before = resident("VmRSS")
    own_before = resident("RssAnon")
    began = time.perf_counter()
    dataset, batches = build(side, micro_batch=micro_batch, **job)
    setup_s = time.perf_counter() - began
    peak = resident("VmHWM") - before
    at = job["samples"] // 3
    began = time.perf_counter()
    for number in range(at - FIRST, at):
        dataset[number]
    first_s = time.perf_counter() - began
    alone = []
    together = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for number in range(at, at + count):
            dataset[number]
        alone.append((time.perf_counter() - began) / count)
        at += count
        reading = batches(at)
        began = time.perf_counter()
        for _ in range(count // micro_batch):
            next(reading)
        together.append((time.perf_counter() - began) / count)
        at += count
    return {
        "setup_s": setup_s,
        "first_s": first_s,
        "peak_bytes": peak,
        "own_bytes": resident("RssAnon") - own_before,
        "sample_s": alone,
        "batch_sample_s": together,
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
