"""tools/build_index.py builds the indices that the run looks for, no more and no less."""

import numpy as np
import pytest

from megatron.config import parse_args
from megatron.data.datasets import build_datasets
from megatron.data.index_cache import CacheEntry
from megatron.training.run.schedules import BatchSchedule, planned_samples
from tests.helpers.indexed import write_documents
from tests.helpers.launching import TINY, launch
from tools import build_index

LEFT_OUT = ("--global-batch-size", "--train-iters", "--eval-iters")
FLAGS = [
    word
    for name, word in zip(["", *TINY], TINY, strict=False)
    if word != "--mock-data" and not {name, word} & {*LEFT_OUT}
] + ["--eval-iters", "2", "--data-order", "megatron"]
ITERATIONS = ["--train-iters", "4", "--eval-interval", "2"]


def write(folder, name, documents):
    random = np.random.RandomState(documents)
    sizes = random.randint(5, 90, documents)
    return write_documents(folder / name, [random.randint(0, 99, size) for size in sizes])


@pytest.fixture
def data(tmp_path):
    """Provide three data sets; 5 % of the smallest for validation round to no document."""
    return {
        name: write(tmp_path, name, documents)
        for name, documents in (("a", 300), ("b", 200), ("c", 8))
    }


def files(folder):
    """List the files in a folder with their identity: name -> (inode, modification time)."""
    if not folder.exists():
        return {}
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def run_reads(flags, world_size):
    """Build the data sets of a run, as its processes do."""
    config = parse_args(flags, world_size)
    build_datasets(config, *planned_samples(config, BatchSchedule.from_config(config)))


def never(*_):
    raise AssertionError("something was left to build")


CASES = {
    "one": "--data-path {a}",
    "blend": "--data-path 0.5 {a} 0.3 {b} 0.2 {c} --split 90,5,5",
    "per split": "--train-data-path 1 {a} 2 {b} --valid-data-path {c}",
    "packed": "--data-path 1 {a} 1 {b} --data-packing best-fit",
    "streams": "--data-path 1 {a} 1 {b} --data-packing best-fit --data-order stream",
    "ramp": "--data-path {a} --rampup-batch-size 4 4 8 --global-batch-size 12",
    "samples": "--data-path 1 {a} 1 {b} --train-samples 3000",
}


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        *((case, "1") for case in CASES if case != "blend"),
        pytest.param("blend", "3", marks=pytest.mark.slow),
    ],
)
def test_the_run_finds_all_and_needs_all(tmp_path, data, capsys, monkeypatch, case, workers):
    flags = [*FLAGS, *ITERATIONS * (case != "samples"), *CASES[case].format(**data).split()]
    cache = tmp_path / "cache"
    reference = tmp_path / "reference"
    arguments = [*flags, "--data-cache-path", str(cache), "--world-size", "2", "--workers", workers]
    assert build_index.main(arguments) == 0, capsys.readouterr().err
    run_reads([*flags, "--data-cache-path", str(reference)], 2)
    assert files(cache).keys() == files(reference).keys()
    for name in files(cache):
        assert (cache / name).read_bytes() == (reference / name).read_bytes()
    built = files(cache)
    assert built

    monkeypatch.setattr(CacheEntry, "store", never)
    run_reads([*flags, "--data-cache-path", str(cache)], 2)
    assert build_index.main(arguments) == 0 and files(cache) == built


def test_another_number_of_processes_needs_others(tmp_path, data):
    """Another number of processes needs other indices.

    Without --global-batch-size the batch, and with it the length of the indices, grows with the
    processes.
    """
    flags = [*FLAGS, *ITERATIONS, "--data-path", data["a"], "--data-cache-path"]
    for world_size in ("2", "4"):
        assert (
            build_index.main([*flags, str(tmp_path / world_size), "--world-size", world_size]) == 0
        )
    assert not files(tmp_path / "2").keys() & files(tmp_path / "4").keys()
    assert build_index.main([*flags, str(tmp_path / "8"), "--global-batch-size", "8"]) == 0
    # 4 processes with micro-batches of 2.
    assert files(tmp_path / "8").keys() == files(tmp_path / "4").keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data-path", "x"], "--global-batch-size"),
        (["--data-path", "/x/y", "--world-size", "2"], "error: /x/y.idx"),
        (
            "--data-path {a} --data-cache-path /dev/null/x --world-size 1".split(),
            "/dev/null/x",
        ),
    ],
)
def test_errors(data, capsys, arguments, words):
    flags = [word.format(**data) for word in arguments]
    assert build_index.main([*FLAGS, *ITERATIONS, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


@pytest.mark.slow
def test_training_and_resuming_find_everything(tmp_path, data):
    """Training finds every index, from the beginning and when resumed with a smaller batch.

    It is pretrain_gpt.py itself. The 2 x 16 samples of the past and 4 x 4 to come are more than the
    6 x 4 of a run from the beginning.
    """
    cache = tmp_path / "cache"
    words = f"--eval-interval 20 --data-path 1 {data['a']} 1 {data['b']} --data-cache-path {cache}"
    flags = [*FLAGS, *words.split(), "--save", f"{tmp_path}/run", "--load", f"{tmp_path}/run"]
    for more in (
        ["--train-iters", "2", "--global-batch-size", "16"],
        ["--train-iters", "6", "--global-batch-size", "4"],
    ):
        assert build_index.main([*flags, *more, "--world-size", "1"]) == 0
        before = files(cache)
        (outcome,) = launch(1, [*flags, *more])
        assert outcome is not None and outcome.code == 0, outcome
        assert files(cache) == before
