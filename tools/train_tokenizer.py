"""Train a lossless SentencePiece vocabulary on JSON lines or text.

Example:

    python tools/train_tokenizer.py --input runs/corpus.jsonl --output runs/spm.model --vocab-size 4096

Use the model with --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model runs/spm.model.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import MOST_WIDTH, Parser, integer, real
from megatron.data.file_lock import renamed_into
from megatron.errors import ConfigError, DataError
from megatron.training.run.process import as_tool
from megatron_preparation.preprocess import ON_BAD_INPUT


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, .parquet or .txt; JSON lines and text may be compressed (.gz, .zst)",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the model file to write")
    parser.add_argument(
        "--vocab-size",
        type=integer(1, MOST_WIDTH),
        default=4096,
        metavar="N",
        help="number of pieces (default: 4096)",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of the text in a JSON line, or column of a parquet file (default: text)",
    )
    parser.add_argument(
        "--on-bad-input",
        choices=ON_BAD_INPUT,
        default="fail",
        help="what to do with a line that is not JSON or UTF-8, or has no text under the key: fail "
        "at the first one (default), or skip and count them",
    )
    parser.add_argument(
        "--sample-megabytes",
        type=real(),
        default=4.0,
        metavar="MB",
        help="largest amount of text to train on, from randomly drawn documents (default: 4)",
    )
    parser.add_argument(
        "--num-threads",
        type=integer(1, 1024),
        default=2,
        metavar="N",
        help="number of threads (default: 2)",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=1234, help="seed for drawing documents (default: 1234)"
    )
    return parser


# Control symbols <unk>, <s>, </s>, a newline, a tab and 256 bytes are always in the vocabulary.
MIN_VOCAB_SIZE = 300
_MAX_LINE_BYTES = 4000


def train_vocabulary(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    json_key: str = "text",
    sample_bytes: int = 4_000_000,
    num_threads: int = 2,
    seed: int = 1234,
    on_bad_input: str = "fail",
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Train byte-pair encoding on about `sample_bytes` of text; return the vocabulary size.

    The model file is for GPTSentencePieceTokenizer; </s> ends a document. The same input and
    arguments give the same model. Text is not normalised, white space is kept, and characters
    without a piece are encoded as bytes, so decode(encode(text)) is the text, except that U+2581,
    SentencePiece's mark for a space, becomes a space. With `on_bad_input` 'skip', unusable
    documents are left out, and `say` is called once, with a note of their number and the first one.
    Lines of more than _MAX_LINE_BYTES are left out, and `say` is called with their number.

    Raises DataError for unusable input and if the model cannot be written, ConfigError for a
    vocabulary that is too small or that the text cannot fill.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size {vocab_size}: must be at least {MIN_VOCAB_SIZE}")
    import sentencepiece

    bad = list[str]()
    documents = list(_texts(inputs, json_key, None if on_bad_input == "fail" else bad))
    if bad:
        say(f"{len(bad)} unusable documents were skipped, the first: {bad[0]}")
    random.Random(seed).shuffle(documents)
    lines, long = _sample_lines(documents, sample_bytes)
    if long:
        say(f"{long} lines of more than {_MAX_LINE_BYTES} bytes were left out of the sample")
    if not lines:
        raise DataError(
            f"{', '.join(map(str, inputs))}: no text to train on, apart from lines of more than "
            f"{_MAX_LINE_BYTES} bytes, which are left out: cut them"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0 if sum(map(len, lines)) < 100_000 else 0.9995,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=1 << 20,
            shuffle_input_sentence=False,
            num_threads=num_threads,
            minloglevel=2,  # its errors repeat its warnings
        )
    except RuntimeError as error:
        size = f"{sum(map(len, lines))} characters of text"
        raise ConfigError(f"--vocab-size {vocab_size}: {_refusal(str(error), size)}") from error
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with renamed_into(path) as file:
            file.write(model.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    return vocab_size


def _refusal(error: str, text: str) -> str:
    """Rephrase SentencePiece's error about a vocabulary size, without locations in its source."""
    if most := re.search(r"set it to a value <= (\d+)", error):
        size = int(most[1])
        less = f"give {size} or less, or " if size >= MIN_VOCAB_SIZE else ""
        return f"{text} give at most {size} pieces: {less}train on more text"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"the bytes, and the symbols in {text}, need {least[1]} pieces: give as many or more"
    return f"cannot be trained on {text}: {error.rpartition('] ')[2]}"


def _texts(
    inputs: Sequence[str | os.PathLike[str]], json_key: str, bad: list[str] | None
) -> Iterator[str]:
    """Yield the documents. Unusable ones are added to `bad`; if it is None, raises DataError."""
    from megatron_preparation.encode import parse_block
    from megatron_preparation.sources import read_blocks

    for block in read_blocks(inputs, json_keys=(json_key,)):
        documents = parse_block(block, (json_key,))
        named = [f"{block.where(number)}: {why}" for number, why in documents.bad]
        if named and bad is None:
            raise DataError(f"{named[0]}; --on-bad-input skip leaves such documents out")
        if bad is not None:
            bad += named
        yield from documents.texts[0]


def _sample_lines(documents: Sequence[str], sample_bytes: int) -> tuple[list[str], int]:
    """Return the lines of the first documents until they have `sample_bytes`, and how many are long.

    Blank and long lines are left out. Documents can be cut into lines because newlines are symbols:
    no piece spans two lines.
    """
    lines: list[str] = []
    size = 0
    long = 0
    for document in documents:
        for line in document.split("\n"):
            encoded = len(line.encode())
            # Tabs are symbols, too, and reserved in training. Long lines are data, not text.
            if encoded > _MAX_LINE_BYTES:
                long += 1
            elif line.strip():
                lines += [segment for segment in line.split("\t") if segment]
                size += encoded
            if size >= sample_bytes:
                return lines, long
    return lines, long


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    size = train_vocabulary(
        args.input,
        args.output,
        vocab_size=args.vocab_size,
        json_key=args.json_key,
        sample_bytes=int(args.sample_megabytes * 1e6),
        num_threads=args.num_threads,
        seed=args.seed,
        on_bad_input=args.on_bad_input,
        say=lambda text: print(f"note: {text}", file=sys.stderr),
    )
    print(f"wrote {args.output}: {size} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
