"""build_datasets: its files, splits and numbers of samples."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.config.io import DataConfig
from megatron.config.pieces import Pieces
from megatron.data.datasets import Datasets, Reading, build_datasets
from megatron.data.gpt_dataset import BlendedDataset
from megatron.errors import ConfigError, DataError
from tests.helpers.indexed import write_documents

SEQ_LENGTH = 8


def config(**data):
    """Return the settings that build_datasets reads."""
    return SimpleNamespace(
        data=DataConfig(**{"split": "8,1,1", **data}),
        model=SimpleNamespace(seq_length=SEQ_LENGTH, vocab_size=50),
        training=SimpleNamespace(seed=1234, eval_iters=10),
        batch=SimpleNamespace(global_batch_size=4),
        pieces=Pieces(),
    )


def build(*counts, reading=Reading(), **data):  # noqa: B008
    return build_datasets(config(**data), *counts, reading=reading)


def write(folder, name, documents, first_token=0):
    """Write documents of 20 equal tokens: document i holds first_token + i."""
    return write_documents(folder / name, [[first_token + i] * 20 for i in range(documents)])


def tokens_in(dataset):
    assert dataset is not None
    return {int(token) for i in range(len(dataset)) for token in dataset[i]}


def test_none_where_no_data_or_no_samples(tmp_path):
    prefix = write(tmp_path, "a", 10)
    built = build(5, 0, 5, data_path=(prefix,), split="9,1,0")
    assert built.train is not None and built.valid is None and built.test is None
    assert build(0, 0, 0, data_path=(prefix,)) == Datasets(None, None, None)
    with pytest.raises(DataError, match="--split .*'0,1'"):
        build(5, 5, 0, data_path=(prefix,), split="0,1")


def test_blend(tmp_path):
    a = write(tmp_path, "a", 10)
    b = write(tmp_path, "b", 10, 100)
    built = build(100, 8, 0, data_path=("3", a, "1", b), data_cache_path=str(tmp_path / "cache"))
    assert built.train is not None and len(built.train) == 100
    from_b = sum(int(built.train[i][0]) >= 100 for i in range(100))
    assert from_b == 25  # the greedy order keeps every share within one sample of its weight
    assert tokens_in(built.valid) == {8, 108}
    assert not (tmp_path / "index-cache").exists()  # everything went to --data-cache-path


def test_blend_with_a_part_too_small_for_a_split(tmp_path):
    """The share of a part that is too small for a split goes to parts that have samples for it."""
    a = write(tmp_path, "a", 10)
    b = write(tmp_path, "b", 1, 100)
    c = write(tmp_path, "c", 10, 200)
    built = build(10, 10, 0, data_path=("1", b, "1", a))
    assert (
        tokens_in(built.valid) == {8}
        and 100 in tokens_in(built.train)
        and len(built.valid or ()) >= 10
    )
    three = build(10, 20, 0, data_path=("2", b, "1", a, "1", c)).valid
    assert isinstance(three, BlendedDataset) and tokens_in(three) == {8, 208}
    assert sum(int(three[i][0]) == 8 for i in range(20)) == 10


def test_paths_of_their_own(tmp_path):
    a = write(tmp_path, "a", 4)
    b = write(tmp_path, "b", 4, 100)
    # An index of the split of `a` with the same counts must not be taken for the index of all of
    # `a`.
    build(4, 4, 0, data_path=(a,), split="1,1")
    built = build(4, 40, 4, train_data_path=(a,), valid_data_path=("1", b, "1", a), split="1,1")
    assert tokens_in(built.train) == {*range(4)}
    assert tokens_in(built.valid) == {*range(4), *range(100, 104)}
    assert built.test is None
    with pytest.raises(DataError, match="--train-data-path"):
        build(4, 4, 0, valid_data_path=(b,))


def test_corpora_of_their_own(tmp_path):
    a = write(tmp_path, "a", 4)
    b = write(tmp_path, "b=c", 1, 100)
    built = build(0, 40, 4, valid_data_path=(f"x={a}", f"y={b}"))
    assert built.valid is None and {n: len(d) for n, d in built.corpora.items()} == {
        "x": 79 // SEQ_LENGTH,
        "y": 19 // SEQ_LENGTH,
    }  # whole samples of one epoch, however many are asked for
    assert tokens_in(built.corpora["y"]) == {100}
    assert tokens_in(build(0, 9, 0, valid_data_path=(b,)).valid) == {100}
    assert not build(0, 0, 4, valid_data_path=(f"x={a}",)).corpora


def test_parts_of_files_and_corpora_that_are_blends(tmp_path):
    """Bounds are round(share * documents), as in BigScience's Megatron-DeepSpeed."""
    a = write(tmp_path, "a", 10)
    b = write(tmp_path, "b", 2, 100)
    build(4, 4, 0, train_data_path=(a,), valid_data_path=(a,))  # indices that must not be taken
    parts = dict(train_data_path=("1", f"{a}@0:0.74", "1", b), valid_data_path=(f"{a}@0.74:1",))
    built = build(40, 40, 0, **parts)
    assert tokens_in(built.train) == {*range(7), 100, 101} and tokens_in(built.valid) == {7, 8, 9}
    blend = ("3", f"x={a}@0.5:0.7", "1", f"x={b}", "2", f"y={b}@0:.5")
    corpora = build(0, 40, 0, valid_data_path=blend).corpora
    assert tokens_in(corpora["y"]) == {100} and len(corpora["y"]) == 19 // SEQ_LENGTH
    # the order of build_blend_index, until it needs a fifth sample of a
    sources = [int(corpora["x"][i][0]) // 100 for i in range(len(corpora["x"]))]
    assert sources == [0, 1, 0, 0, 0, 1] and tokens_in(corpora["x"]) >= {5, 6}


def test_exact_epochs(tmp_path):
    """Training epochs have 80 tokens: three make 239 // 8 = 29 samples, whatever the run takes."""
    prefix = write(tmp_path, "a", 10)

    def build(samples, epochs, **data):
        one = ("1", prefix, "1", prefix) if data.pop("blend", False) else (prefix,)
        split = data.pop("split", "4,6,0")
        return build_datasets(
            config(data_path=one, split=split, train_data_exact_num_epochs=epochs, **data),
            samples,
            5,
            0,
        )

    short = build(1, 3).train
    full = build(29, 3).train
    assert short is not None and full is not None and len(short) == len(full) == 29
    assert [short[i].tolist() for i in range(29)] == [full[i].tolist() for i in range(29)]
    tokens = np.concatenate([full[i][:-1] for i in range(29)])
    # 8 tokens fewer than 60 of each part
    assert len(tokens) == 232 and (np.bincount(tokens, minlength=4) >= 52).all()
    # The order equals that of a run that needs exactly these samples: its cache is used.
    plain = build(29, None).train
    assert plain is not None and plain.description == full.description
    assert len(build(30, 3, dataloader_type="cyclic").train or ()) == 29
    with pytest.raises(ConfigError, match=r"\b29\b.*\b30\b.*--train-samples 29"):
        build(30, 3)
    with pytest.raises(ConfigError, match="--train-data-exact-num-epochs 3.* 2 "):
        build(5, 3, blend=True)


def test_packing(tmp_path):
    """Pack documents of 20 equal tokens into samples of 9.

    Pieces have 9, 9 and 4 tokens; two pieces and padding fill a sample.
    """
    blend = ("1", write(tmp_path, "a", 10, 1), "1", write(tmp_path, "b", 10, 20))
    packing = config(data_path=blend, data_packing="best-fit", split="1")
    train = build_datasets(packing, 40, 0, 0, reading=Reading(pad_id=49)).train
    assert isinstance(train, BlendedDataset)
    for tokens, lengths in [(train[i].tolist(), train.segments(i)) for i in range(len(train))]:
        assert lengths is not None and (lengths.tolist(), 49 in tokens) in (
            ([9], False),
            ([4, 4], True),
        )
