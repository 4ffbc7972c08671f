"""Comparison of the settings, code and files that all ranks of a run must share.

Each rank publishes digests of them at the rendezvous, before torch connects anything, and the first
process compares them. A difference ends the run on every rank: if any rank had a different seed,
learning rate, model or index file, the ranks would silently train something else. The samples of
the data sets are known only later, and are compared then.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.checkpoint.files import digest, sampled_digest
from megatron.config import Config
from megatron.config.io import hugging_face_folder
from megatron.config.settings import all_options
from megatron.data.added_tokens import FILES_BESIDE
from megatron.data.datasets import SPLIT_NAMES, Datasets, data_prefixes
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.indexed_dataset import data_files
from megatron.errors import MegatronError
from megatron.parallel.process_descriptions import Alike
from megatron.training.run.provenance import versions

MAY_DIFFER = {
    # a process's rank on its node, and the address of the first process
    "local_rank",
    "master_addr",
    "master_port",
    "data_cache_path",
    "stage_data_to",  # scratch folders of a node
    # used by one rank only, or set separately for each rank
    "metrics_file",
    "tensorboard_dir",
    "wandb_exp_name",
    "wandb_save_dir",
    "mlflow_run_name",
    "trace_dir",
    "kill_switch_file",
    "save_trigger_file",
}
"""Names of settings that may differ between ranks. Settings without an effect may differ, too."""


_PACKAGE = Path(__file__).parents[2]
# Suffixes of the files that are compared in a tokenizer's folder.
_TOKENIZER = (".json", ".model", ".txt", ".tiktoken", ".jinja")
# Bytes that a process reads from all its files together, and the least and most from one file.
_ALL_BYTES = 32 << 20
_LEAST_BYTES = 32 << 10
_MOST_BYTES = 4 << 20
_THREADS = 8  # concurrent reads: on a parallel file system each takes a millisecond
_SAMPLES = 16  # compared in each data set


def identity(config: Config, placement: str = "") -> Alike:
    """Return the settings and library versions of this process, and digests of code and files.

    `placement` describes the ranks' placement on devices (RankMapping.agreed). Every process reads
    its files, not only one on each node: the same path may lead each process to a different file,
    if it is relative or on a mount. Little is read, compared with what the process reads later.
    """
    values = config.to_dict()
    pieces = {f"your own {name}": where for name, where in config.pieces.describe().items()}
    settings: dict[str, object] = {
        option.flag: values[name]
        for name, option in all_options().items()
        if name not in MAY_DIFFER and not option.inert and not option.internal
    }
    libraries = {name: version for name, version in versions().items() if name != "system"}
    code = code_digests(config)
    return {
        "settings": {**settings, **pieces, "placement": placement, **libraries},
        "files": {**code, **file_digests(inputs(config))},
    }


def code_digests(config: Config, package: Path = _PACKAGE) -> dict[str, str]:
    """Return the digest of each source file by its name: our files and the user's own.

    The content is compared, because copies of the same clone have different modification times.
    The user's files may be in other folders on other nodes: their names have no folder, and a name
    that several of them have stands for all of these. Files that this process imports after the
    first call are not among them: after a restart, a new process has not imported them yet.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    pieces = {*config.pieces.files(), *([config.pieces.file] if config.pieces.file else [])}
    beside = _loaded_from(frozenset(map(os.path.dirname, pieces)))
    user_files = {*pieces, *beside, *([main] if main else [])}
    named = [(str(path.relative_to(package.parent)), path) for path in package.rglob("*.py")]
    named += [(os.path.basename(path), Path(path)) for path in user_files]
    digests: dict[str, set[str]] = {}
    for name, path in named:
        digests.setdefault(name, set()).add(_file(path, _MOST_BYTES))
    return {name: ", ".join(sorted(some)) for name, some in sorted(digests.items())}


@functools.cache
def _loaded_from(folders: frozenset[str]) -> frozenset[str]:
    """Return the files in these folders that this process has imported before the first call."""
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return frozenset(path for path in loaded if path and os.path.dirname(path) in folders)


def inputs(config: Config) -> list[Path]:
    """Return the files besides code that determine a run's results.

    A checkpoint of this program is not among them: the ranks load the one that rank 0 finds, and
    its manifest and shard lists have the digests of all its parts.
    """
    model = hugging_face_folder(config.checkpoint.load)
    paths = [] if model is None else model_files(model)
    if (new := config.checkpoint.model_from) is not None:
        paths += [Path(new)] if Path(new).is_file() else _in_folder(Path(new), (".json",))
    tokenizer = config.tokenizer
    data = config.data
    if (name := tokenizer.tokenizer_model) is not None:
        path = Path(name)
        beside = [path, *(path.with_name(one) for one in FILES_BESIDE)]
        paths += _in_folder(path, _TOKENIZER) if path.is_dir() else beside
    named = (tokenizer.vocab_file, tokenizer.merge_file, *(config.training.eval_tasks or ()))
    paths += [Path(name) for name in named if name is not None]
    if data.data_file_list is not None:
        paths.append(Path(data.data_file_list))
    try:
        prefixes = data_prefixes(config)
    except MegatronError:  # no rank can read the file list, or else its digest differs
        prefixes = []
    return list(dict.fromkeys([*paths, *(path for one in prefixes for path in data_files(one))]))


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model in a Hugging Face folder."""
    return _in_folder(folder, (".json", ".safetensors"))


def file_digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return size and digest of each file, or why it cannot be read.

    Long files are sampled: at most 4 MiB are read from each, and 32 MiB from all together, or 32
    KiB from each if there are more than 1,024.
    """
    share = max(_ALL_BYTES // max(len(paths), 1), _LEAST_BYTES)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda path: _file(path, min(share, _MOST_BYTES)), paths)
        return dict(zip(map(str, paths), digests, strict=True))


def sample_digests(datasets: Datasets) -> dict[str, str]:
    """Return a digest of some samples of each data set, by its name.

    The digests reveal ranks with a different index, a different copy of the data, or a different
    data set of the user's own.
    """
    splits = zip(SPLIT_NAMES, (datasets.train, datasets.valid, datasets.test), strict=True)
    named = {f"{name} data": dataset for name, dataset in splits if dataset is not None}
    corpora = {f"corpus {name}": dataset for name, dataset in datasets.corpora.items()}
    return {name: _samples(dataset) for name, dataset in {**named, **corpora}.items()}


def _samples(dataset: TokenDataset) -> str:
    """Return the number of samples, and a digest of evenly spaced ones, first and last included."""
    last = len(dataset) - 1
    span = last - dataset.first
    steps = range(_SAMPLES) if span >= 0 else ()
    numbers = sorted({dataset.first + span * i // (_SAMPLES - 1) for i in steps})
    arrays = (
        array
        for i in numbers
        for array in (dataset[i], dataset.segments(i), dataset.loss_tokens(i))
        if array is not None
    )
    return f"{last + 1} samples [{digest(b''.join(array.tobytes() for array in arrays))[:12]}]"


def _in_folder(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    except OSError:  # its readers report the problem
        return [folder]


def _file(path: Path, most_bytes: int) -> str:
    """Return size and digest of a file, or why it cannot be read."""
    try:
        if not path.is_file():
            return "no file"
        size, value = sampled_digest(path, most_bytes)
        return f"{size} bytes [{value[:12]}]"
    except OSError as error:
        return str(error.strerror)
