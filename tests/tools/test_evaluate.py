"""tools/evaluate.py: every token once, in its window, on any layout; texts as training reads them."""

import functools
import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from tokenizers import processors

from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.data.indexed_dataset import bin_bytes
from megatron.data.sampler import make_micro_batch
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import DataError
from megatron_inference import tokens
from tests.checkpoint.written import make
from tests.helpers import fault_points
from tests.helpers.hugging_face import GPT2, S, V, from_gpt2, hugging_face
from tests.helpers.indexed import write_documents
from tests.helpers.launching import launch
from tests.helpers.preprocessing import trained_pairs
from tests.helpers.tiny import one_stage
from tests.helpers.training import local_shards

DOCUMENTS = [np.random.RandomState(n).randint(0, V - 1, n).tolist() for n in (3, 41, 1, 22)]
TEXTS = [" ".join(map(str, document)) for document in DOCUMENTS]


@functools.cache
def gpt2():
    """Return Hugging Face's model, float64, and its weights under our names."""
    model = hugging_face("gpt2")
    values = from_gpt2({name: p.detach().clone() for name, p in model.named_parameters()})
    return model.double().eval(), values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Provide a checkpoint of that model, and DOCUMENTS as text and as token files."""
    folder = tmp_path_factory.mktemp("evaluate")
    weights = {f"master.{name}": value.contiguous() for name, value in gpt2()[1].items()}
    for name, masked in (("checkpoint", False), ("masked", True)):
        config = Config.create(
            **GPT2 | {"tokenizer_type": "NullTokenizer", "eod_mask_loss": masked}
        )
        make(folder / name, 7, weights, config=plain(config))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    write_documents(folder / "data", [[*document, V - 1] for document in DOCUMENTS])
    return folder


def run(folder, n, *words, load="checkpoint", **options):
    base = ["--load", str(folder / load), "--format", "json"]
    outcomes = launch(n, [*base, *words], script="tools/evaluate.py", **options)
    return [outcome for outcome in outcomes if outcome is not None]


def expected(context, stride, masked):
    """Return the mean loss of all tokens but the first, each from the tokens of its window.

    masked   leave out the first token of each document
    """
    sequence = [i for document in DOCUMENTS for i in (V - 1, *document)]
    losses = []
    for at in range(1, len(sequence)):
        if masked and sequence[at - 1] == V - 1:
            continue
        begin = stride * max(0, math.ceil((at - context) / stride))
        with torch.no_grad():
            logits = gpt2()[0](torch.tensor([sequence[begin:at]])).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[sequence[at]].item())
    return float(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "processes", "words", "stride"),
    [
        ("checkpoint", 2, "--text text.jsonl --stride 3 --micro-batch-size 3", 3),
        ("checkpoint", 2, f"--data-path data --stride {S} --tensor-model-parallel-size 2", S),
        ("checkpoint", 2, "--text text.jsonl --context-parallel-size 2", S // 2),
        ("masked", 1, "--data-path data", S // 2),
    ],
)
def test_loss_is_that_of_each_token_in_its_window(folder, tmp_path, load, processes, words, stride):
    """The reference is Hugging Face's GPT-2 in float64, one call for each token.

    Standard output has the result alone.
    """
    paths = [
        str(folder / word) if word in ("text.jsonl", "data") else word for word in words.split()
    ]
    arm = {0: (chatter, str(tmp_path / "log"))}
    outcomes = run(folder, processes, *paths, load=load, arm=arm)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes
    result = json.loads(outcomes[0].output)
    assert processes == 1 or "[Gloo]" in (tmp_path / "log").read_text()
    masked = load == "masked"
    loss = expected(S, stride, masked)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    number = sum(map(len, DOCUMENTS)) + len(DOCUMENTS) - 1
    size = sum(map(len, TEXTS))
    if masked:
        number -= len(DOCUMENTS)
        size -= sum(len(text.split()[0]) for text in TEXTS)
    assert (result["tokens"], result["bytes"], result["iteration"]) == (number, size, 7)
    assert result["bits_per_byte"] == pytest.approx(loss * number / math.log(2) / size, rel=1e-5)


@pytest.mark.slow
def test_padding_takes_no_room_of_experts(tmp_path):
    """A text in one of three windows, and not as long, has the loss of a pass over it alone."""
    fields = dict(num_experts=4, moe_eval_capacity_factor=0.8, init_method_std=0.5)
    config = Config.create(**GPT2 | fields | {"tokenizer_type": "NullTokenizer"})
    chunk = one_stage(config).eval()
    shards = local_shards(chunk.parameters()).items()
    make(
        tmp_path / "experts",
        7,
        {f"master.{name}": torch.from_numpy(value) for name, (_, value) in shards},
        config=plain(config),
    )
    ids = DOCUMENTS[0] * 3
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(map(str, ids))}) + "\n")
    words = ["--text", str(tmp_path / "text.jsonl"), "--micro-batch-size", "3"]
    (outcome,) = run(tmp_path, 1, *words, load="experts")
    with torch.no_grad():
        loss = chunk(make_micro_batch(np.array([[V - 1, *ids]])), None).item()
    result = json.loads(outcome.output.splitlines()[-1])
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


def chatter(log):
    """Let groups write to standard output, as Gloo does in torch 2.10; standard error is a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    connect = torch.distributed.init_process_group

    def connect_loudly(*args, **more):
        connect(*args, **more)
        os.write(1, b"[Gloo] Rank 0 is connected\n")

    torch.distributed.init_process_group = connect_loudly


@pytest.mark.parametrize("context", [1, 2, 7])
def test_windows_predict_each_token_once(context):
    for stride in range(1, context + 1):
        for length in range(3 * context + 3):
            sequence = np.arange(100, 100 + length)
            seen = {}
            for window in tokens.windows(np.split(sequence, [1, 1, 5]), context, stride):
                for i in range(window.start, window.stop):
                    target = int(window.tokens[i + 1])
                    assert target not in seen
                    seen[target] = int(window.tokens[0])
            assert seen == {
                100 + at: 100 + stride * max(0, math.ceil((at - context) / stride))
                for at in range(1, length)
            }


def byte_pairs(path, *, bos):
    """Write a tokenizer of 300 entries; with `bos` it puts a token before every text."""
    fast = trained_pairs([LINES], 300, ["<|endoftext|>", "<s>"])
    if bos:
        fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast.save(str(path))
    return build_tokenizer("HFTokenizer", tokenizer_model=str(path))


LINES = "".join(f"Zeile {n}: größer,\n\n  or not?\n\tso\n" * (n % 3) for n in range(80))


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(bos, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "TEXT_BLOCK_BYTES", 700)
    tokenizer = byte_pairs(tmp_path / "tokenizer.json", bos=bos)
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b").write_text("short")
    sources = tokens.text_sources([str(tmp_path / "a.txt"), str(tmp_path / "b")])
    chunks = list(tokens.text_segments(sources, "text", tokenizer))
    assert (len(chunks) == 2) == bos  # pieces exist where they can
    expected = [tokenizer.eod, *tokenizer.encode(LINES), tokenizer.eod, *tokenizer.encode("short")]
    assert [i for chunk in chunks for i in chunk.tokens.tolist()] == expected
    size = len(LINES.encode()) + 5
    assert (sum(chunk.text_bytes or 0 for chunk in chunks), chunks[-1].read_bytes) == (size, size)


@pytest.mark.parametrize("bos", [False, True])
def test_token_files_are_read_as_their_text(bos, tmp_path, monkeypatch):
    """A sequence longer than what is read at once, and runs of short ones."""
    monkeypatch.setattr(tokens, "SEGMENT_TOKENS", 40)
    tokenizer = byte_pairs(tmp_path / "tokenizer.json", bos=bos)
    texts = ["ab", "x" * 130, "größer", *map(str, range(50))]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"k": t}) + "\n" for t in texts))
    prefix = str(tmp_path / "data")
    documents = [[*tokenizer.encode(t), tokenizer.eod] for t in texts]
    write_documents(tmp_path / "data", [*documents, []])
    theirs = list(
        tokens.text_segments(tokens.text_sources([str(tmp_path / "text.jsonl")]), "k", tokenizer)
    )
    ours = list(tokens.file_segments([prefix], tokenizer.vocab_size, tokenizer, count_bytes=True))
    assert len(ours) > 4
    assert np.array_equal(*(np.concatenate([p.tokens for p in parts]) for parts in (ours, theirs)))
    assert sum(part.text_bytes or 0 for part in ours) == len("".join(texts).encode())
    assert ours[-1].read_bytes == bin_bytes([prefix])
    with pytest.raises(DataError, match=str(tokenizer.eod)):
        list(tokens.file_segments([prefix], tokenizer.eod, None, count_bytes=True))


def test_unusable_texts_are_named(tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=9)
    path = tmp_path / "a.txt"
    for content, message in ((b"", "empty"), (b"1 2\n\xff", "byte 4"), (b"1 12", "12")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            list(tokens.text_segments(tokens.text_sources([str(path)]), "text", tokenizer))
        assert str(path) in str(caught.value)


@pytest.mark.slow
def test_impossible_requests_are_refused(folder, tmp_path):
    write_documents(tmp_path / "empty", [[]])
    for words, message in (
        (["--text", str(folder / "text.jsonl"), "--stride", "17"], "17"),
        (["--data-path", str(tmp_path / "empty")], str(tmp_path / "empty")),
    ):
        (outcome,) = run(folder, 1, *words)
        assert outcome.code == 2 and message in outcome.output, outcome


def interrupt(name):
    """Send SIGINT to this process when it opens a file."""
    fault_points.on("open", lambda *_: os.kill(os.getpid(), signal.SIGINT), containing=name)


@pytest.mark.slow
def test_ctrl_c_ends_at_once(folder):
    words = ["--text", str(folder / "text.jsonl")]
    (outcome,) = run(folder, 1, *words, arm={0: (interrupt, "text.jsonl")})
    assert outcome.code == 130 and "Traceback" not in outcome.output, outcome
