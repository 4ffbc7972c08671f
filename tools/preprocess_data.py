"""Tokenize JSON lines, parquet or plain text into the .bin/.idx files that training reads.

Example:

    python tools/preprocess_data.py --input 'shards/*.jsonl.zst' --output-prefix data/corpus --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt

writes data/corpus_text_document.bin and .idx, which training reads with --data-path
data/corpus_text_document.

With --chat, the lines are conversations for fine-tuning, {"messages": [{"role": "user", "content":
"..."}, ...]} or {"prompt": "...", "completion": "..."}; a loss mask is written next to the data, so that
training with --loss-mask required learns only the assistant's turns and the completions.

To resume a stopped or killed run, repeat the command. Until the run is complete, its files are in
data/corpus_partial, and files of an earlier run are not changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import MOST_WIDTH, Parser, integer
from megatron.data.tokenizer import settings_of
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool, handled_signals
from megatron_preparation.chat import find_chat
from megatron_preparation.encode import PreprocessOptions
from megatron_preparation.preprocess import ON_BAD_INPUT, Listeners, PreprocessStopped, preprocess
from megatron_preparation.progress import PreprocessProgress
from megatron_preparation.sources import FORMATS
from megatron_preparation.tokenizer_flags import add_tokenizer_flags, tokenizer_settings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WITHOUT_EFFECT = {
    "lang": "the rule for sentences does not depend on the language",
    "partitions": "--workers divides the work among processes, with a single output",
    "seq_length": "documents are written whole",
    "trust_remote_code": "tokenizers never run remote code",
    "find_optimal_num_workers": "each worker is one core: the default is all of them",
    "workers_to_check": "each worker is one core: the default is all of them",
    "max_documents": "it is for --find-optimal-num-workers",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, whose flags are Megatron's."""
    parser = Parser(description=__doc__)
    _add_input(parser.add_argument_group("input"))
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--chat",
        action="store_true",
        help="read messages, or prompt and completion; write PREFIX_chat_document and its loss "
        "mask, PREFIX_chat_document_mask",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template that turns messages into text (default: the one next to the "
        "tokenizer.json of HFTokenizer, or a simple one: <|ROLE|>, line end, content, line end). A "
        "prompt and its completion are joined without a template",
    )
    group.add_argument(
        "--max-tokens",
        type=integer(2, MOST_WIDTH),
        metavar="N",
        help="treat a conversation of more than N tokens as bad input (see --on-bad-input); a "
        "useful N is --seq-length + 1 of the training (default: conversations are written whole, "
        "and cut as other documents are when samples are packed)",
    )
    group = parser.add_argument_group("tokenizer")
    add_tokenizer_flags(group, required=True)
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to every document that does not end with it",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="the files are PREFIX_KEY_LEVEL.bin and .idx; LEVEL is document or sentence",
    )
    group.add_argument(
        "--dataset-impl",
        choices=("mmap",),
        default="mmap",
        help="output format (mmap is the only one)",
    )
    group.add_argument(
        "--restart",
        action="store_true",
        help="discard the unfinished run in PREFIX_partial, or write finished files again",
    )
    group = parser.add_argument_group("work")
    cores = len(os.sched_getaffinity(0))
    group.add_argument(
        "--workers",
        type=integer(1, 1024),
        default=cores,
        metavar="N",
        help="processes that tokenize, one core each (default: the cores available to this "
        f"process, here {cores}); 1 tokenizes in this process. The output is the same for any "
        "number",
    )
    group.add_argument(
        "--log-interval",
        type=integer(),
        metavar="N",
        help="documents between two progress lines in a log file (default: one line every 10 s)",
    )
    group = parser.add_argument_group("accepted for existing scripts, without effect")
    group.add_argument("--lang", metavar="LANGUAGE", help=WITHOUT_EFFECT["lang"])
    group.add_argument("--partitions", metavar="N", help=WITHOUT_EFFECT["partitions"])
    group.add_argument("--seq-length", metavar="N", help=WITHOUT_EFFECT["seq_length"])
    group.add_argument(
        "--trust-remote-code", action="store_true", help=WITHOUT_EFFECT["trust_remote_code"]
    )
    group.add_argument("--find-optimal-num-workers", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--workers-to-check", nargs="+", help=argparse.SUPPRESS)
    group.add_argument("--max-documents", help=argparse.SUPPRESS)
    return parser


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, .parquet, or plain text with one document per file (.txt); JSON "
        "lines and text may be compressed (.gz, .zst). A quoted pattern such as "
        "'shards/*.jsonl' selects the matching files, sorted by name",
    )
    group.add_argument(
        "--input-format", choices=FORMATS, default="auto", help="auto: by file name (default)"
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="keys of a line, or parquet columns, to tokenize, each into its own files (default: "
        "text)",
    )
    group.add_argument(
        "--on-bad-input",
        choices=ON_BAD_INPUT,
        default="fail",
        help="what to do with unusable input, such as a line that is not JSON or UTF-8, or has no "
        "text under the key: fail at the first (default), or skip, count and list all of it in "
        "PREFIX_bad_input.txt",
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence; sentences end after . ! ? and at line ends",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: keep the white space between sentences",
    )


def options_of(
    args: argparse.Namespace, say: Callable[[str], None] = lambda _: None
) -> PreprocessOptions:
    """Return the options of the command line; `say` is called with the origin of the chat template.

    Raises ConfigError for flags that contradict or need --chat and for an invalid template,
    DataError for an unreadable one.
    """
    # jobs always record --vocab-extra-ids
    tokenizer = {"vocab_extra_ids": 0, **tokenizer_settings(args)}
    chat = None
    if args.chat:
        for flag in ("json_keys", "split_sentences", "keep_newlines"):
            if getattr(args, flag):
                raise ConfigError(
                    f"--chat and --{flag.replace('_', '-')} contradict each other: a conversation "
                    "is one sequence, from the keys messages, or prompt and completion"
                )
        hugging_face = settings_of(**tokenizer).tokenizer_type == "HFTokenizer"
        chat, origin = find_chat(
            args.chat_template, args.tokenizer_model if hugging_face else None, args.max_tokens
        )
        say(f"chat template: {origin}")
    elif chat_flags := [n for n in ("chat_template", "max_tokens") if getattr(args, n) is not None]:
        raise ConfigError(f"--{chat_flags[0].replace('_', '-')} needs --chat")
    return PreprocessOptions(
        tokenizer=tokenizer,
        json_keys=("chat",) if args.chat else tuple(args.json_keys or ["text"]),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        input_format=args.input_format,
        chat=chat,
    )


class StopSignal:
    """First signal to stop that was received, or 0; the second ends the process immediately."""

    received = 0

    def receive(self, number: int) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, 2 after an error, 128 + N after signal N.

    After a second signal it is 130.
    """
    args = build_parser().parse_args(argv)
    for name, why in WITHOUT_EFFECT.items():
        if getattr(args, name):
            print(f"note: --{name.replace('_', '-')} has no effect: {why}", file=sys.stderr)
    progress = PreprocessProgress(args.log_interval)
    stop = StopSignal()
    listeners = Listeners(
        on_progress=progress.update,
        on_note=progress.say,
        on_bad=progress.bad,
        should_stop=lambda: stop.received != 0,
    )
    try:
        with closing(progress), handled_signals(SIGNALS, stop.receive):
            totals = preprocess(
                args.input,
                args.output_prefix,
                options_of(args, progress.say),
                workers=args.workers,
                on_bad_input=args.on_bad_input,
                restart=args.restart,
                listeners=listeners,
            )
    except PreprocessStopped as error:
        print(f"{signal.Signals(stop.received).name}: {error}", file=sys.stderr)
        return 128 + stop.received
    except KeyboardInterrupt:
        print("stopped at once; the same command resumes after the last save", file=sys.stderr)
        return 128 + signal.SIGINT
    print("\n".join(progress.summary(totals)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
