"""Files, sample orders and blends, byte for byte those of megatron-core.

`make test` compares with digests of megatron-core's results (core_golden.json). The campaign
`peers` compares with megatron-core itself, in both directions, and with the digests. It looks for
megatron-core in the folder MEGATRON_CORE_FOLDER, then in build/peers/, where it is installed from
PyPI if it is missing. To make the digests again: MEGATRON_CORE_GOLDEN=write, with the campaign.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest

from megatron.data.datasets import build_datasets
from megatron.data.gpt_dataset import ARRAYS, IndexRequest, build_index
from megatron.data.indexed_dataset import IndexedDataset, build_blend_index
from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.helpers.launching import ROOT
from tests.helpers.tiny import tiny
from tools.merge_datasets import merge

VERSION = "0.16.1"
GOLDEN = Path(__file__).with_name("core_golden.json")
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def documents_of(dtype):
    """Return documents of several sequences, with extreme values of the type.

    Some sequences are empty, and some documents have none.
    """
    if np.dtype(dtype).kind == "f":
        low = -1.5
        high = float(np.finfo(np.float32).max)
    else:
        low = int(np.iinfo(dtype).min)
        high = int(np.iinfo(dtype).max)
    long = np.random.RandomState(0).randint(0, 127, 5000).tolist()
    return [[[1, 2, 3], [4]], [], [[low, high]], [[], [5], []], [long], [[]], [[6], [7, 8]], []]


def write(prefix, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents_of(dtype):
            tokens = np.array([token for sequence in document for token in sequence], dtype)
            writer.add_batch(tokens, list(map(len, document)), [len(document)])
    return prefix


def digest(*chunks):
    return hashlib.sha256(b"".join(chunks)).hexdigest()[:32]


def digest_of(prefix):
    return digest(Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes())


def orders(count):
    """Return splits of documents, some empty or of one token, and up to 6 epochs of samples."""
    random = np.random.RandomState(7)
    cases = []
    for _ in range(count):
        number = int(random.randint(1, 60))
        sizes = np.where(
            random.rand(number) < 0.2, random.randint(0, 2, number), random.randint(0, 300, number)
        )
        start = int(random.randint(number))
        stop = int(random.randint(start + 1, number + 1))
        sizes[start] += 2
        seq_length = int(random.randint(1, 40) if random.rand() < 0.8 else random.randint(1, 2000))
        per_epoch = int(sizes[start:stop].sum()) / seq_length
        cases.append(
            {
                "sizes": sizes.tolist(),
                "start": start,
                "stop": stop,
                "seq_length": seq_length,
                "num_samples": max(1, int(per_epoch * random.rand() * random.choice([1, 2.5, 6]))),
                "seed": int(random.randint(2**32, dtype=np.uint32)),
            }
        )
    return cases


def our_order(case):
    """Return the digest of the three arrays, and the way in which the last epoch is used."""
    sizes = np.array(case["sizes"], np.int32)
    split = case["start"], case["stop"], int(sizes[case["start"] : case["stop"]].sum())
    request = IndexRequest(
        "p", "train", "1", *split, case["num_samples"], case["seq_length"], case["seed"], sizes
    )
    arrays = build_index(request)
    epoch_use = min(request.num_epochs, 2), request.separate_last_epoch
    return digest(*(np.ascontiguousarray(arrays[name]).tobytes() for name in ARRAYS)), epoch_use


def blends(largest):
    random = np.random.RandomState(8)
    weights = [
        np.ones(1),
        np.ones(3),
        np.ones(200),
        *(random.gamma(0.7, size=n) + 1e-3 for n in range(2, largest)),
    ]
    return [{"weights": (some / some.sum()).tolist(), "size": 2000} for some in weights]


def our_blend(case):
    which, number = build_blend_index(np.array(case["weights"]), case["size"])
    return digest(which.astype(np.int16).tobytes(), number.astype(np.int64).tobytes())


RUNS = {
    "one source": (["a"], None, [70, 9, 0]),
    "several epochs": (["b"], None, [300, 5, 20]),
    "blend": (["a", "b", "c"], [0.2, 0.3, 0.5], [400, 30, 10]),
    "uneven blend": (["a", "c"], [3.0, 0.125], [90, 8, 0]),
}


def write_run(folder):
    """Write the sources of RUNS."""
    random = np.random.RandomState(9)
    for name in "abc":
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for size in random.randint(1, 60, 90):
                writer.add_document(random.randint(0, 9000, size))


def core_run(folder, case):
    """Return the arguments of megatron-core's builder for one of RUNS."""
    names, weights, samples = RUNS[case]
    blend = [[str(folder / name) for name in names], weights]
    fields = dict(split="80,15,5", samples=samples, seq_length=17, seed=1234)
    return dict(fields, blend=blend, cache=str(folder / "core"))


def our_run(folder, case):
    """Return the digests of the samples that a run with --data-order megatron reads."""
    names, weights, samples = RUNS[case]
    pairs = zip(weights or [1] * len(names), names, strict=True)
    config = tiny(
        data_path=[word for weight, name in pairs for word in (str(weight), str(folder / name))],
        split="80,15,5",
        seq_length=17,
        vocab_size=9000,
        train_samples=samples[0],
        train_iters=None,
        data_order="megatron",
    )
    built = build_datasets(config, *samples)
    return [
        digest(*(dataset[n].tobytes() for n in range(count)))
        for dataset, count in zip((built.train, built.valid, built.test), samples, strict=True)
    ]


def test_runs_read_what_megatron_cores_do(tmp_path):
    write_run(tmp_path)
    golden = json.loads(GOLDEN.read_text())["runs"]
    assert [our_run(tmp_path, case) for case in RUNS] == golden


def test_files_are_megatron_cores(tmp_path):
    golden = json.loads(GOLDEN.read_text())["files"]
    for dtype, expected in zip(DTYPES, golden, strict=True):
        prefix = write(tmp_path / dtype, dtype)
        assert digest_of(prefix) == expected, dtype
        indexed = IndexedDataset(prefix)
        sequences = [*chain(*documents_of(dtype))]
        assert [indexed[i].tolist() for i in range(len(indexed))] == sequences


def test_orders_and_blends_are_megatron_cores():
    golden = json.loads(GOLDEN.read_text())
    actual = [our_order(case) for case in orders(len(golden["orders"]))]
    assert [order for order, _ in actual] == golden["orders"]
    assert {epoch_use for _, epoch_use in actual} == {(1, False), (2, False), (2, True)}
    assert [our_blend(case) for case in blends(6)] == golden["blends"]


# megatron-core itself


@pytest.fixture(scope="module")
def core():
    """Return the folder with megatron-core; skip where there is none and PyPI is out of reach."""
    named = os.environ.get("MEGATRON_CORE_FOLDER")
    folder = Path(named) if named else ROOT / "build" / "peers" / f"megatron-core-{VERSION}"
    if (folder / "megatron" / "core").is_dir():
        return folder.resolve()
    if named:
        pytest.skip(f"MEGATRON_CORE_FOLDER={named} has no megatron/core in it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Installed under another name first, so that a killed installation does not pass for a whole
    # one.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pip = [sys.executable, *"-m pip install --quiet --disable-pip-version-check".split()]
        pip += "--no-deps --only-binary :all: --retries 1 --timeout 15".split()
        pip += ["--target", f"{temporary}/core"]
        done = subprocess.run([*pip, f"megatron-core=={VERSION}"], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"megatron-core {VERSION} cannot be installed from PyPI: {reason}")
        with contextlib.suppress(OSError):  # another test process was faster
            os.rename(f"{temporary}/core", folder)
    return folder.resolve()


def run_core(core, jobs):
    """Let megatron-core, in place of our package, do these jobs; return its answers."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("core_peer.py")), str(core)],
        input=json.dumps(jobs),
        text=True,
        capture_output=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode and "ImportError" in done.stderr.strip().splitlines()[-1]:
        pytest.skip(f"megatron-core does not import here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_golden(name, actual):
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("MEGATRON_CORE_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps({**golden, name: actual}, indent=1) + "\n")
    else:
        assert actual == golden[name]


@pytest.mark.campaign("peers")
def test_files_both_ways(core, tmp_path):
    """Both sides read each other's files and merge files of both, memory-mapped or not."""
    jobs = []
    for dtype in DTYPES:
        ours, theirs = (tmp_path / f"{side}_{dtype}" for side in ("ours", "theirs"))
        write(ours, dtype)
        inputs = [str(theirs), str(ours)]
        jobs += [
            {"write": str(theirs), "dtype": dtype, "documents": documents_of(dtype)},
            {"read": str(ours), "mmap": True},
            {"read": str(ours), "mmap": False},
            {"merge": f"{theirs}_merged", "dtype": dtype, "inputs": inputs},
        ]
    answers = run_core(core, jobs)
    for at, dtype in enumerate(DTYPES):
        ours, theirs = (tmp_path / f"{side}_{dtype}" for side in ("ours", "theirs"))
        documents = documents_of(dtype)
        sequences = [*chain(*documents)]
        starts = [0, *accumulate(map(len, documents))]
        assert digest_of(ours) == digest_of(theirs)
        expected = dict(dtype=dtype, sequences=sequences, document_indices=starts)
        expected["lengths"] = list(map(len, sequences))
        assert answers[4 * at + 1] == answers[4 * at + 2] == expected
        merge([theirs, ours], f"{ours}_merged")
        assert digest_of(Path(f"{ours}_merged")) == digest_of(Path(f"{theirs}_merged"))
        for mapped in (True, False):
            indexed = IndexedDataset(theirs, mmap=mapped)
            assert indexed.dtype == np.dtype(dtype) and indexed.document_indices.tolist() == starts
            assert [indexed[i].tolist() for i in range(len(indexed))] == sequences
            assert indexed.modes is None
    check_golden("files", [digest_of(tmp_path / f"theirs_{dtype}") for dtype in DTYPES])


@pytest.mark.campaign("peers")
def test_orders_and_blends(core):
    requests = {"order": orders(150), "blend": blends(40)}
    answers = run_core(core, [{name: case} for name, cases in requests.items() for case in cases])
    order = answers[:150]
    blend = answers[150:]
    assert order == [our_order(case)[0] for case in requests["order"]]
    assert blend == [our_blend(case) for case in requests["blend"]]
    check_golden("orders", order[:20])
    check_golden("blends", blend[: len(blends(6))])


@pytest.mark.campaign("peers")
def test_runs(core, tmp_path):
    """The data sets of a run with --data-order megatron are those of megatron-core's builder."""
    write_run(tmp_path)
    answers = run_core(core, [{"run": core_run(tmp_path, case)} for case in RUNS])
    assert [our_run(tmp_path, case) for case in RUNS] == answers
    check_golden("runs", answers)
