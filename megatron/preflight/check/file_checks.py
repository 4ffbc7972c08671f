"""What the run reads: data, tokenizer, indices, the checkpoint that it goes on from."""
from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config import Config
from megatron.errors import CheckpointError, DataError, MegatronError
from megatron.preflight.check.findings import Finding, error, note, warning
from megatron.preflight.check.subject import Subject
from megatron.untrusted import is_count


def with_vocabulary(s: Subject, config: Config) -> tuple[Config, list[Finding]]:
    """The configuration with the size of the tokenizer's vocabulary, and what is wrong with its files."""
    from megatron.data.tokenizer import build_tokenizer

    t = config.tokenizer
    if t.tokenizer_type is None:
        return config, []
    place = s.flag("--tokenizer-model", "--vocab-file", "--tokenizer-type", "--preset")
    try:
        tokenizer = build_tokenizer(
            t.tokenizer_type, vocab_file=t.vocab_file, merge_file=t.merge_file, tokenizer_model=t.tokenizer_model,
            vocab_extra_ids=t.vocab_extra_ids, tiktoken_pattern=t.tiktoken_pattern,
            tiktoken_num_special_tokens=t.tiktoken_num_special_tokens,
            tiktoken_special_tokens=t.tiktoken_special_tokens, vocab_size=config.model.vocab_size,
        )  # fmt: skip
    except MegatronError as problem:
        found = [error("tokenizer", str(problem), place)]
        if config.model.vocab_size is None:
            found.append(note("tokenizer", "figures below take GPT-2's vocabulary of 50257 instead", place))
            config = config.replace(vocab_size=50257)
        return config, found
    return config.replace(vocab_size=tokenizer.vocab_size), []


@dataclass
class DataState:
    """What is known of the data: `tokens` by prefix, whether the indices are built (None: not known)."""

    tokens: dict[str, int] = field(default_factory=dict)
    indices: int = 0
    built: int = 0


def check_data(s: Subject, state: DataState) -> Iterator[Finding]:
    """Token files, and whether the indices over them are there."""
    config = s.config
    if config is None or config.data.mock_data:
        return
    from megatron.data.datasets import data_prefixes
    from megatron.data.indexed_dataset import IndexedDataset

    place = s.flag("--data-path", "--train-data-path", "--data-file-list", "--valid-data-path")
    try:
        prefixes = data_prefixes(config)
    except MegatronError as problem:
        yield error("data", str(problem), place)
        return
    broken = False
    for prefix in prefixes:
        if s.is_local(prefix):
            yield note("data", f"{prefix} is on the nodes' own disks: not looked at", place)
            broken = True
            continue
        try:
            indexed = IndexedDataset(prefix, mmap=config.data.mmap_bin_files)
            state.tokens[prefix] = indexed.tokens_between(0, len(indexed))
        except DataError as problem:
            broken = True
            yield error("data", str(problem), place)
    if broken:
        return
    try:
        yield from _check_indices(s, config, state)
    except MegatronError as problem:
        yield error("data", str(problem), place)


def _check_indices(s: Subject, config: Config, state: DataState) -> Iterator[Finding]:
    place = s.flag("--data-cache-path", "--data-path", "--train-data-path", "--data-file-list")
    if config.data.data_packing != "concat":
        yield note("index", "whether the index of --data-packing best-fit is built is not looked at", place)
        return
    entries = list(_entries(config))
    state.indices = len(entries)
    state.built = sum(found for _, found in entries)
    missing = [folder for folder, found in entries if not found]
    if not missing:
        return
    flags = shlex.join([*_index_flags(s), f"--world-size={config.parallel.world_size}"])
    yield warning(
        "index", f"{len(missing)} of {len(entries)} indices are not built: one rank would build them while all "
        f"others wait. "
        f"Before: python tools/build_index.py {flags}", place,
    )  # fmt: skip
    for folder in sorted(set(missing)):
        parent = _existing(Path(folder))
        if not os.access(parent, os.W_OK):
            yield error("index", f"{folder} cannot be written: give another folder with --data-cache-path", place)


def _index_flags(s: Subject) -> list[str]:
    words = list(s.training.arguments)
    for name in ("--master-addr", "--master-port", "--local_rank"):
        while name in words:
            at = words.index(name)
            del words[at : at + 2]
    return words


def _entries(config: Config) -> Iterator[tuple[str, bool]]:
    """(folder that it would be written to, whether it is there) of each index that a run from its beginning reads."""
    from megatron.data.datasets import TRAIN, WHOLE, plan_splits
    from megatron.data.gpt_index import PARTS, IndexRequest, cache_directories
    from megatron.data.index_cache import CacheEntry
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.splits import SPLIT_NAMES, samples_of_part, split_bounds
    from megatron.training.micro_batches import BatchSchedule, planned_samples

    data, exact = config.data, config.data.train_data_exact_num_epochs
    counts = planned_samples(config, BatchSchedule.from_config(config))
    for index, (plan, wanted) in enumerate(zip(plan_splits(data), counts, strict=True)):
        if plan is None or wanted == 0:
            continue
        parts = []
        for part in plan.blend:
            indexed = IndexedDataset(part.prefix)
            bounds = (0, len(indexed)) if plan.split == WHOLE else split_bounds(plan.split, len(indexed))[index]
            tokens = indexed.tokens_between(*bounds)
            if tokens:
                parts.append((part, bounds, tokens))
        total = sum(part.weight for part, _, _ in parts)
        for part, bounds, tokens in parts:
            samples = wanted if len(plan.blend) == 1 else samples_of_part(wanted, part.weight / total)
            if index == TRAIN and exact is not None:
                samples = (exact * tokens - 1) // config.model.seq_length
            request = IndexRequest(
                part.prefix, SPLIT_NAMES[index], plan.split, *bounds, tokens, max(samples, 1), config.model.seq_length,
                config.training.seed,
            )  # fmt: skip
            folders = cache_directories(part.prefix, data.data_cache_path)
            there = [CacheEntry(Path(folder), request.description, PARTS).load() is not None for folder in folders]
            yield str(folders[-1]), any(there)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@dataclass
class Resumption:
    """Where the run goes on: the checkpoint, its iteration, and the last iteration of the run."""

    folder: str | None = None
    iteration: int = 0
    end: int | None = None


def check_checkpoint(s: Subject, resumption: Resumption) -> Iterator[Finding]:
    """What --load would find, and whether the model can hold it."""
    config = s.config
    if config is None:
        return
    from megatron.checkpoint.find import find, open_checkpoint, required
    from megatron.checkpoint.settings import check_architecture
    from megatron.training.micro_batches import BatchSchedule, total_iterations

    place, load = s.flag("--load", "--load-tag"), config.checkpoint.load
    try:
        resumption.end = total_iterations(config, BatchSchedule.from_config(config))
    except MegatronError as problem:
        yield error("batch", str(problem), s.flag("--rampup-batch-size", "--global-batch-size"))
        return
    if load is None:
        return
    try:
        found = find(load, config.checkpoint.load_tag)
        for rejected in found.rejected:
            yield warning("checkpoint", f"broken: {rejected}", place)
        for text in found.notes:
            yield note("checkpoint", text, place)
        if found.folder is None and not found.rejected and not config.checkpoint.exit_on_missing_checkpoint:
            return
        checkpoint = open_checkpoint(required(load, found))
        if not config.checkpoint.use_checkpoint_args:
            check_architecture(checkpoint.config, config, str(checkpoint.folder))
    except CheckpointError as problem:
        yield error("checkpoint", str(problem), place)
        return
    resumption.folder = str(checkpoint.folder)
    if config.checkpoint.finetune or config.checkpoint.reset_iteration:
        return
    resumption.iteration = checkpoint.iteration
    consumed = checkpoint.state["state"].get("consumed_samples", 0)
    if not is_count(consumed):
        yield error("checkpoint", f"{checkpoint.folder} says {consumed!r} where it counts consumed samples", place)
        return
    resumption.end = total_iterations(config, BatchSchedule.from_config(config), checkpoint.iteration, consumed)
    if resumption.iteration >= resumption.end:
        yield warning(
            "checkpoint", f"{checkpoint.folder} is of iteration {resumption.iteration}, and the run ends at "
            f"{resumption.end}: nothing is left to train", place,
        )  # fmt: skip
