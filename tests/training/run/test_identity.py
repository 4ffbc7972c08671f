"""Settings and files that all ranks must share.

A difference ends the run on each rank, and says which rank has what.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.config.pieces import load_pieces
from megatron.errors import LaunchError
from megatron.training.run.identity import code_digests, file_digests, identity, inputs
from tests.helpers.indexed import write_documents
from tests.helpers.launching import TINY, launch
from tests.helpers.tiny import tiny
from tests.parallel.ranks import ranks_in_threads

USUAL = tiny(seed=1, world_size=4)
DATA = [
    *(word for word in TINY if word != "--mock-data"),
    *("--data-path", "../text", "--data-cache-path", "cache", "--split", "1"),
    *("--data-order", "megatron"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
]


def meet(alike):
    """Return None for each rank that met the others, or its error."""
    return ranks_in_threads(range(len(alike)), len(alike), alike=alike)


def refused(errors, *words):
    """Check that all report the same, with these words, after their own names."""
    assert all(isinstance(error, LaunchError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1 and all(
        word in str(errors[0]) for word in words
    ), errors[0]


@pytest.mark.parametrize(
    ("setting", "flag", "value", "shown"),
    [
        ("lr", "--lr", 2e-3, ("0.01", "0.002")),
        ("global_batch_size", "--global-batch-size", 8, ("4", "8")),
    ],
)
def test_a_setting_that_one_rank_has_otherwise_ends_all(setting, flag, value, shown):
    other = USUAL.replace(**{setting: value})
    ranks = [identity(config) for config in (USUAL, USUAL, other, USUAL)]
    refused(meet(ranks), f"{flag} is {shown[0]} on rank 0-1, 3 vs. {shown[1]} on rank 2")


def test_scratch_folders_and_addresses_may_differ(tmp_path):
    scratch = {
        "data_cache_path": str(tmp_path),
        "stage_data_to": "/nvme",
        "tensorboard_dir": str(tmp_path),
        "local_rank": 1,
        "master_addr": "10.0.0.1",
        "wandb_exp_name": "$RANDOM",
    }
    ranks = [identity(config) for config in (USUAL, USUAL.replace(**scratch))]
    assert meet(ranks) == [None, None]


def test_another_file_of_the_same_size_on_one_node_ends_all(tmp_path):
    """Another file of the same name and size on one node ends all ranks.

    Each of the files in turn has another second half, or weight.
    """
    prefix = tmp_path / "text"
    model = tmp_path / "model"
    words = tmp_path / "words"
    for folder in (model, words):
        folder.mkdir()
    for name in ("text", "text_mask"):
        write_documents(tmp_path / name, [range(5000)])
    blend = tmp_path / "blend"
    tasks = tmp_path / "tasks.jsonl"
    texts = {
        blend: f"1.0 {prefix}\n",
        tasks: '{"context": "a", "ending": "b"}\n',
        model / "config.json": '{"hidden_size": 16}',
        model / "model.safetensors": "ab" * (3 << 20),  # longer than what is read of a file
        words / "tokenizer.json": '{"model": {}}',
        words / "tokenizer_config.json": '{"eos_token": "a"}',
        words / "chat_template.jinja": "{{ messages }}",
    }
    for path, text in texts.items():
        path.write_text(text)
    config = tiny(
        load=f"hf:{model}",
        data_file_list=str(blend),
        eval_tasks=(str(tasks),),
        tokenizer_type="HFTokenizer",
        tokenizer_model=str(words),
    )

    def seen():
        return {"files": file_digests(inputs(config))}

    usual = seen()
    tokens = [f"{prefix}{end}" for end in (".bin", ".idx", "_mask.bin", "_mask.idx")]
    assert meet([usual, seen()]) == [None] * 2
    for path in (*texts, *map(Path, tokens)):
        before = path.read_bytes()
        half = len(before) // 2
        changed = before[:half] + b"!" * (len(before) - half)
        path.write_bytes(b"2" + before[1:] if path == blend else changed)
        other = seen()
        path.write_bytes(before)
        errors = meet([usual, usual, other])
        refused(errors, f'{path} is "{len(before)} bytes', "rank 0-1", "rank 2")
        for unchanged in {*texts, *map(Path, tokens)} - {path}:
            assert f"{unchanged} is" not in str(errors[0])


def test_other_code_on_one_node_ends_all(tmp_path, monkeypatch):
    """Ours, a file of the user's pieces, or a module beside it that this file imports.

    Another of the user's files may have the same name.
    """
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "model.py").write_text("x = 1")
    (tmp_path / "beside.py").write_text("y = 1")
    (tmp_path / "pieces.py").write_text(
        "import beside\ndef schedule(*_): pass\nPIECES = {'schedule': schedule}"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "pieces.py").write_text(
        "def optimizer(*_): return 1\nPIECES = {'optimizer': optimizer}"
    )
    schedule = load_pieces(str(tmp_path / "pieces.py")).schedule
    optimizer = load_pieces(str(tmp_path / "more" / "pieces.py")).optimizer
    config = USUAL.with_pieces(schedule=schedule, optimizer=optimizer)
    usual = code_digests(config, package)
    users = ("pieces.py", "more/pieces.py", "beside.py")
    for path in (package / "model.py", *(tmp_path / name for name in users)):
        before = path.read_text()
        path.write_text(before.replace("1", "2") + " ")
        other = code_digests(config, package)
        path.write_text(before)
        name = "megatron/model.py" if path.parent == package else path.name
        refused(meet([{"files": usual}, {"files": other}]), f"{name} is ", "rank 0", "rank 1")
    assert code_digests(config, package) == usual


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Return two folders with the same names and other content.

    They hold checkpoint and exported model of a run, and the index of one data set.
    """
    root = tmp_path_factory.mktemp("nodes")
    write_documents(root / "text", (range(start, start + 40) for start in range(40)))
    for seed, name in enumerate("ab"):
        (root / name).mkdir()
        saved = ["--save", "run", "--save-hf", "hf", "--train-iters", "1", "--seed", str(seed)]
        (outcome,) = launch(1, [*DATA, *saved], arm={0: (os.chdir, str(root / name))})
        assert outcome.code == 0, outcome
    shutil.rmtree(root / "b" / "cache")
    shutil.copytree(root / "a" / "cache", root / "b" / "cache")
    (index,) = (root / "b" / "cache").glob("*_shuffle_idx.npy")
    np.save(index, np.load(index)[::-1])
    return root / "a", root / "b"


def ends(arguments, arm, *named):
    for outcome in launch(2, arguments, arm=arm):
        assert outcome.code == 2 and "iteration        1" not in outcome.output, outcome
        assert all(word in outcome.output for word in named), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--load", "hf:hf", "--pipeline-model-parallel-size", "2"], "hf/model.safetensors"),
        (["--load", "run", "--zero-stage", "3"], "run/iter_0000001"),
        (["--context-parallel-size", "2"], "train data"),
    ],
)
def test_ranks_with_other_weights_or_another_index_do_not_train(nodes, arguments, named):
    arm = {rank: (os.chdir, str(folder)) for rank, folder in enumerate(nodes)}
    ends([*DATA, "--train-iters", "1", "--seed", "0", *arguments], arm, named)


def also(*flags):
    """Give this process more flags than the others."""
    import sys

    sys.argv += flags


@pytest.mark.slow
def test_a_pipeline_with_two_seeds_does_not_train():
    arguments = [*TINY, "--pipeline-model-parallel-size", "2"]
    arm = {1: (also, "--seed", "4711")}
    ends(arguments, arm, "--seed", "1234 on rank 0", "4711 on rank 1")
