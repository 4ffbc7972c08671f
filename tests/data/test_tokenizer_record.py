"""Data of another tokenizer is refused before the first step, and epochs are counted."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config import Config
from megatron.data.forecast import check_data
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import DataError
from megatron_preparation.encode import PreprocessOptions
from megatron_preparation.preprocess import preprocess
from tests.helpers.indexed import write_documents
from tests.helpers.launching import TINY, launch
from tests.helpers.preprocessing import EOD, NULL, byte_tokenizer, json_lines
from tools import inspect_dataset, merge_datasets


def write(folder, name, tokenizer, texts):
    (folder / f"{name}.jsonl").write_bytes(json_lines(texts))
    preprocess([folder / f"{name}.jsonl"], folder / name, PreprocessOptions(tokenizer))
    return f"{folder / name}_text_document"


def check(prefix, tokenizer, samples=1):
    """Return epochs, and the number of notices."""
    text = build_tokenizer(**tokenizer)
    flags = {name: v for name, v in tokenizer.items() if name != "vocab_size"}
    config = Config.create(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        seq_length=4,
        max_position_embeddings=4,
        micro_batch_size=1,
        train_iters=1,
        vocab_size=text.vocab_size,
        data_path=prefix.split(),
        split="100,0,0",
        **flags,
    )
    forecast, notices = check_data(config, text, samples)
    return {source.name: source.epochs for source in forecast.sources}, len(notices)


def other_file(folder, change):
    """Return the byte tokenizer of another file, whose content `change` has changed."""
    settings = json.loads(Path(byte_tokenizer(folder)["tokenizer_model"]).read_text())
    change(settings)
    (folder / "other.json").write_text(json.dumps(settings, indent=3))
    return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder / "other.json")}


def swap(settings):
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add(settings):
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    settings["added_tokens"].append({"id": EOD + 1, "content": "<x>", "special": True, **token})


def test_data_of_another_tokenizer_is_refused(tmp_path):
    bytes_ = byte_tokenizer(tmp_path)
    prefix = write(tmp_path, "a", bytes_, ["abc", "de"])
    record = json.loads(Path(f"{prefix}.tokenizer.json").read_text())
    assert (record["vocab_size"], record["eod"], record["largest_id"]) == (EOD + 1, EOD, ord("e"))
    assert check(prefix, bytes_)[1] == check(prefix, other_file(tmp_path, add))[1] == 0
    other = other_file(tmp_path, swap)
    with pytest.raises(DataError, match="a_text_document"):
        check(prefix, other)
    flags = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", other["tokenizer_model"]]
    assert inspect_dataset.main([prefix, *flags]) == 2 and inspect_dataset.main([prefix]) == 0
    assert check(prefix, {**NULL, "vocab_size": 300})[1] == 1  # its ids may mean anything
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "z"}')
    assert check(prefix, bytes_)[1] == 1  # another end of a document
    with pytest.raises(DataError, match=r"a_text_document.*\b101\b.*\b50\b"):
        check(prefix, {**NULL, "vocab_size": 50})
    (tmp_path / "tokenizer_config.json").unlink()
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)  # by a program that does not know the record
    tokens[-1] = 300
    tokens.tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"a_text_document.*\b300\b"):
        check(prefix, bytes_)


def test_data_without_a_record_get_a_notice_and_their_largest_id_is_found(tmp_path):
    for name, largest in (("a", 99), ("b", 300)):
        write_documents(tmp_path / name, [[5, largest, 7, 1, 2, 3]])
    assert check(f"{tmp_path}/a", NULL)[1] == 1
    with pytest.raises(DataError, match=r"/b: .*\b300\b"):
        check(f"1 {tmp_path}/a 1 {tmp_path}/b", NULL)


def test_a_record_goes_where_its_data_go(tmp_path, capsys):
    bytes_ = byte_tokenizer(tmp_path)
    first = write(tmp_path, "a", bytes_, ["abc"])
    second = write(tmp_path, "b", bytes_, ["xyz"])
    words = ["--output-prefix", str(tmp_path / "all"), "--inputs"]
    assert merge_datasets.main([*words, first, second]) == 0
    record = json.loads((tmp_path / "all.tokenizer.json").read_text())
    assert record["largest_id"] == ord("z") and check(f"{tmp_path}/all", bytes_)[1] == 0
    third = write(tmp_path, "c", other_file(tmp_path, swap), ["abc"])
    write_documents(tmp_path / "unknown", [[1]])
    capsys.readouterr()
    assert merge_datasets.main([*words, str(tmp_path / "unknown"), first, third]) == 0
    assert first in capsys.readouterr().err and not (tmp_path / "all.tokenizer.json").exists()
    write_documents(first, [[1]])  # by another program
    assert check(first, bytes_)[1] == 1


@pytest.mark.slow
def test_a_training_ends_before_its_first_step(tmp_path):
    prefix = write(tmp_path, "a", byte_tokenizer(tmp_path), ["abcdefgh" * 40])
    flags = [word for word in TINY if word != "--mock-data"]
    for drop in ("--vocab-size", "--tokenizer-type"):
        if drop in flags:
            del flags[flags.index(drop) : flags.index(drop) + 2]
    words = [*flags, "--data-path", prefix, "--train-iters", "2", "--lr", "0.1"]
    other = other_file(tmp_path, swap)["tokenizer_model"]
    tokenizer = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", other]
    outcomes = launch(2, [*words, *tokenizer])
    assert all(outcome and outcome.code == 2 and prefix in outcome.output for outcome in outcomes)
