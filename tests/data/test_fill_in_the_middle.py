"""Fill-in-the-middle: texts put together again from their parts."""

import numpy as np
import pytest

from megatron.config.io import DataConfig
from megatron.data.fill_in_the_middle import FillInTheMiddle
from megatron.data.history import DataPhase, PhaseSource
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sampler import MicroBatchStream, Share
from megatron.data.stream import Opening, StreamDataset
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokenizer_adapters import Tokenizer
from megatron.errors import ConfigError
from tests.helpers.indexed import write_documents
from tests.helpers.preprocessing import byte_tokenizer
from tests.helpers.processes import run_processes
from tests.helpers.tiny import records, run, tiny, values

BOS, EOS, EOD, SEPARATOR, PREFIX, SUFFIX, MIDDLE, PAD, PAIR = range(128, 137)


class Letters(Tokenizer):
    """A token for each ASCII letter and one for "ab", and two tokens around every text."""

    behind = 1

    def __init__(self):
        super().__init__(PAIR + 1, EOD, {SEPARATOR: "|"})

    def _encode(self, texts):
        return [
            [BOS, *(PAIR if c == "\1" else ord(c) for c in text.replace("ab", "\1")), EOS]
            for text in texts
        ]

    def _decode(self, ids):
        return "".join("ab" if i == PAIR else "\ufffd" if i == 127 else chr(i) for i in ids)


def rearrangement(**data):
    tokens = dict(prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX, pad=PAD)
    separator = SEPARATOR if data.get("fim_split_sample") else None
    return FillInTheMiddle(DataConfig(**data), Letters(), 7, **tokens, separator=separator)


def ids(text):
    return np.array([SEPARATOR if c == "|" else EOD if c == "." else ord(c) for c in text])


def split(tokens, end):
    """Return the pieces between the tokens `end`."""
    pieces = [[]]
    for token in tokens:
        if token == end:
            pieces.append([])
        else:
            pieces[-1].append(int(token))
    return pieces


def restored(piece):
    """Return the text of a document, and its form: 0, PSM or SPM."""
    text = Letters()._decode
    if PREFIX not in piece:
        return text(piece), 0
    head, rest = piece[: piece.index(SUFFIX)], piece[piece.index(SUFFIX) + 1 :]
    suffix, end = rest[: rest.index(MIDDLE)], rest[rest.index(MIDDLE) + 1 :]
    assert head[0] == PREFIX
    return text(head[1:]) + text(end) + text(suffix), "PSM" if head[1:] else "SPM"


WORDS = ["xyz" * 3, "longer than that", "q", "", "cdcdcd"]


@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_documents_are_cut_in_three_and_keep_their_text(spm):
    """A document with an empty prefix looks the same in both forms."""
    sample = np.append(ids(".".join(WORDS) + "."), [PAD] * 12)  # room for the tokens
    rearrange = rearrangement(fim_rate=1.0, fim_spm_rate=spm)
    cuts = set()
    for position in range(200):
        result, filled = rearrange(position, sample)
        assert len(result) == len(sample) and filled.all()
        documents = split(result, EOD)[: len(WORDS)]
        texts, forms = zip(*map(restored, documents), strict=True)
        assert list(texts) == WORDS and forms[3] == 0
        assert spm == 0 or "PSM" not in forms
        assert spm == 1 or forms.count("PSM") >= 1
        cuts.add((documents[0].index(SUFFIX), documents[0].index(MIDDLE)))
    assert len(cuts) > (8 if spm else 40), "of 10 suffixes, or of 55 pairs of cuts"
    again = rearrange(3, sample)[0]
    assert again.tolist() == rearrange(3, sample)[0].tolist() != rearrange(4, sample)[0].tolist()


def test_rates_files_and_texts_that_stay():
    documents = ["aXc|bXd|eXf", "gXh", "#Xi", "#Xj|kXl"] * 25
    sample = np.append(ids(".".join(documents) + "."), [PAD] * 900)
    settings = dict(fim_rate=0.75, fim_split_sample="|", fim_fragment_rate=0.5, fim_no_prefix="#")
    result, _ = rearrangement(**settings)(0, sample)
    counts = dict.fromkeys(("alone", "files", "some", "avoided"), 0)
    for text, piece in zip(documents, split(result, EOD), strict=False):
        files = [restored(file) for file in split(piece, SEPARATOR)]
        assert "|".join(file for file, _ in files) == text
        avoided = [bool(form) for file, form in files if file.startswith("#")]
        counts["avoided"] += sum(avoided)
        changed = sum(bool(form) for _, form in files)
        counts["alone"] += changed * (text == "gXh")
        counts["files"] += changed * (len(files) == 3)
        counts["some"] += (changed > 0) * (len(files) == 3)
    assert counts["avoided"] == 0
    # expected: 0.75 of 25; half of 75 files in 0.75 of 25 documents, some in 7/8 of these documents
    for name, expected in (("alone", 18.75), ("files", 28.1), ("some", 16.4)):
        assert abs(counts[name] - expected) < 10, (name, counts)
    unreadable = np.array([127, *b"cdef", EOD])
    assert rearrangement(fim_rate=1.0)(0, unreadable)[0].tolist() == unreadable.tolist()


def test_samples_keep_their_length():
    """Tokens that are too many are cut off; padding after too few is not in the loss."""
    longer, filled = rearrangement(fim_rate=1.0)(0, ids("cdefgh.ij"))
    assert len(longer) == 9 and filled.all() and list(longer[:1]) == [PREFIX]
    shorter, filled = rearrangement(fim_rate=1.0)(0, ids("ab" * 20))
    missing = int((filled == 0).sum())
    assert missing >= 40 - 20 - 2 - 3 and (shorter[-missing:] == PAD).all()
    assert (filled[:-missing] == 1).all() and PAD not in shorter[:-missing]
    assert restored(shorter[:-missing].tolist())[0] == "ab" * 20


@pytest.mark.slow
def test_tokens_have_to_be_those_of_the_tokenizer(tmp_path):
    settings = byte_tokenizer(tmp_path)
    tokenizer = build_tokenizer(**settings)
    names = {f"fim_{name}_token": name[0].upper() for name in ("prefix", "middle", "suffix", "pad")}
    fields = dict(settings, vocab_size=None, train_data_path=("a",), fim_rate=0.5, **names)
    rearrange = FillInTheMiddle.of(tiny(**fields, fim_eod_token="<|endoftext|>"), tokenizer)
    assert (rearrange.prefix, rearrange.middle, rearrange.suffix) == tuple(tokenizer.encode("PMS"))
    for wrong in (
        dict(fim_suffix_token="<no>"),
        dict(fim_eod_token="E"),
        dict(fim_middle_token="P"),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
            FillInTheMiddle.of(tiny(**{**fields, **wrong}), tokenizer)


@pytest.mark.slow
def test_a_run_trains_on_rearranged_documents_and_evaluates_plain_ones(tmp_path):
    """The second of three stages reads no data. Letters serve as the tokens."""
    random = np.random.RandomState(0)
    for name in ("train", "valid"):
        write_documents(tmp_path / name, (random.randint(97, 123, 30) for _ in range(40)))
    fields = dict(
        byte_tokenizer(tmp_path),
        vocab_size=None,
        num_layers=3,
        seq_length=32,
        hidden_dropout=0.0,
        train_iters=3,
        eval_iters=1,
        eval_at_start=True,
        num_workers=2,
        train_data_path=(f"{tmp_path}/train",),
        valid_data_path=(f"{tmp_path}/valid",),
    )
    tokens = {f"fim_{name}_token": name[0].upper() for name in ("prefix", "middle", "suffix")}
    fim = dict(fields, **tokens, fim_pad_token="A", fim_rate=0.9, reset_attention_mask=True)
    plain = dict(fields, reset_attention_mask=True)
    cases = {"plain": (1, plain), "one": (1, fim)}
    cases["three"] = (3, dict(fim, pipeline_model_parallel_size=3, num_workers=0))
    found = {}
    for name, (ranks, of_case) in cases.items():
        run_processes(ranks, run, dict(of_case, save=str(tmp_path / name)))
        events = records(tmp_path / name)
        found[name] = [
            np.array(values(events[kind], "lm_loss")) for kind in ("iteration", "validation")
        ]
    for one, other in zip(found["one"], found["three"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert (np.abs(found["one"][0] - found["plain"][0]) > 1e-4).all()
    assert found["one"][1][0] == pytest.approx(found["plain"][1][0], rel=1e-6)


def test_texts_on_both_sides_of_a_joint_are_rearranged_apart(tmp_path, monkeypatch):
    """A sample of a stream whose length changed joins pieces of documents."""
    texts = ["".join(chr(97 + (7 * i + j) % 26) for j in range(i % 9 + 1)) for i in range(60)]
    prefix = write_documents(tmp_path / "a", [ids(text + ".") for text in texts], np.int32)
    sources = (PhaseSource(1.0, prefix, prefix, 0, len(texts)),)
    phases = tuple(
        DataPhase(start, length, "concat", 1, sources) for start, length in ((0, 5), (20, 32))
    )
    stream = StreamDataset(phases, 20, 24, Opening(IndexedDataset))
    rearrange = rearrangement(fim_rate=1.0, fim_spm_rate=0.5)
    batches = MicroBatchStream(stream, Share(1), 20, rearrange=rearrange)
    joined = 0
    for position in range(20, 24):
        (batch,) = batches.take(1)
        marks = stream.loss_tokens(position)
        joints = np.flatnonzero(marks == 0) if marks is not None else np.zeros(0, int)
        parts = [split(part, EOD) for part in np.split(stream[position], joints)]
        expected = [Letters()._decode(piece) for part in parts for piece in part]
        left_out = np.flatnonzero(batch.loss_mask[0].numpy() == 0) + 1
        tokens = np.append(batch.tokens[0], batch.labels[0, -1])
        shown = [split(part, EOD) for part in np.split(tokens, left_out)]
        pieces = [piece for part in shown for piece in part][:-1]  # the last one is cut off
        assert [restored(piece)[0] for piece in pieces] == expected[: len(pieces)]
        joined += len(left_out)
    assert joined
