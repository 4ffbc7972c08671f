"""Measure loss, perplexity and bits per byte of a trained model on files, or its accuracy in tasks.

Examples:

    python tools/evaluate.py --load runs/a --text wiki.test.txt
    torchrun --nproc-per-node 8 tools/evaluate.py --load checkpoints --data-path held_out_text_document \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --format json
    python tools/evaluate.py --load runs/a --tasks capitals.jsonl endings.jsonl
    python tools/evaluate.py --load runs/a --lm-eval-tasks mine --lm-eval-include-path my_tasks

Every token is predicted once, from the tokens before it: windows of --context tokens begin every
--stride tokens, and each counts only the predictions that the previous window did not make. A
smaller stride gives more context and takes longer. As in training, an end-of-document token (EOD)
separates documents and is predicted as well; one also precedes the first document of the texts and,
if the checkpoint has a tokenizer, each file of tokens. If the training left the first token of each
document out of the loss (--eod-mask-loss or best-fit packing), so does the evaluation, also in the
bytes of the text. Model and tokenizer are those of the checkpoint; the layout may differ from that
of the training, and the result does not depend on it.

A file of --tasks has JSON lines, {"context": "...", "choices": ["...", "..."], "answer": 0} (multiple choice) or
{"context": "...", "ending": "..."} (cloze). The most likely choice is found in three ways: by the sum of its tokens'
log-likelihoods, by this sum per byte, and by this sum per token. An ending is right if greedy decoding gives it. Texts
that are too long are cut on the left, and counted. --lm-eval-tasks runs tasks of EleutherAI's lm-evaluation-harness, if
that is installed; tasks that generate text need --context-parallel-size 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import MOST_WIDTH, Parser, integer
from megatron.data.indexed_dataset import IndexedDataset, bin_bytes, data_files
from megatron.data.tokenizer_record import check_tokenizer
from megatron.errors import ConfigError, DataError
from megatron.metrics_file import strict_json
from megatron.training.run.process import as_tool, leave
from megatron_inference import tokens
from megatron_inference.model import Trained, add_flags, run_with_model
from megatron_inference.tokens import TokenSegment, Window
from megatron_preparation.progress import ByteProgress

if TYPE_CHECKING:
    from megatron.data.sampler import MicroBatch

_SHOWN = 4  # files in the table
_PER_STAGE = 4  # micro-batches per step and pipeline stage: a bubble of less than a fifth


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    add_flags(parser)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text, a document per file; JSON lines (.jsonl) or parquet, a document per row; "
        "may be compressed (.gz, .zst)",
    )
    data.add_argument(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="token files (.bin and .idx), which spare each process the tokenization",
    )
    data.add_argument(
        "--tasks",
        nargs="+",
        metavar="FILE",
        help="multiple-choice or cloze tasks, one file of JSON lines each",
    )
    data.add_argument(
        "--lm-eval-tasks",
        nargs="+",
        metavar="NAME",
        help="tasks or groups of lm-evaluation-harness (package lm-eval)",
    )
    parser.add_argument(
        "--lm-eval-include-path",
        metavar="FOLDER",
        help="folder with task files of your own for --lm-eval-tasks. They may name Python code, "
        "which is run: use files that you trust",
    )
    parser.add_argument(
        "--num-fewshot",
        type=integer(0, 1000),
        metavar="N",
        help="few-shot examples for each question of --lm-eval-tasks (default: the task's)",
    )
    parser.add_argument(
        "--limit",
        type=integer(),
        metavar="N",
        help="evaluate only the first N examples of each task of --lm-eval-tasks",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key or column of the text (default: text)",
    )
    parser.add_argument(
        "--context",
        type=integer(1, MOST_WIDTH),
        metavar="N",
        help="tokens of a window (default: the sequence length of the training)",
    )
    parser.add_argument(
        "--stride",
        type=integer(1, MOST_WIDTH),
        metavar="N",
        help="tokens between the starts of windows (default: half of --context); a stride of "
        "--context is the fastest, and is what training uses",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=integer(),
        default=4,
        metavar="N",
        help="windows or texts of one forward pass (default: 4)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="format of the result (default: text)",
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    changed = {
        "seq_length": args.context,
        "micro_batch_size": args.micro_batch_size,
        "bf16": args.bf16,
        "fp16": args.fp16,
    }
    use = evaluate
    if args.tasks or args.lm_eval_tasks:
        use = evaluate_tasks if args.tasks else evaluate_with_lm_eval
        if args.stride is not None:
            raise ConfigError("--stride is for --text and --data-path: a task has no windows")
    tokens_of = [path for prefix in args.data_path or () for path in data_files(prefix)]
    files = [*map(Path, (args.text or []) + (args.tasks or [])), *tokens_of]
    return run_with_model(args, partial(use, args), files, changed)


def evaluate_tasks(args: argparse.Namespace, trained: Trained) -> None:
    """Evaluate --tasks and print the results on rank 0."""
    from megatron.training.report.events import TaskEvaluated
    from megatron.training.run.tasks import context_of, evaluate_task, read_tasks

    first = trained.topology.world.is_first
    for task in read_tasks(args.tasks, trained.tokenizer, context_of(trained.config)):
        start = time.perf_counter()
        with ExitStack() as stack:
            total = len(task.requests)
            progress = ByteProgress(task.name, total, unit="texts")
            shown = stack.enter_context(progress) if first else None
            figures = evaluate_task(
                trained,
                task,
                micro_batch_size=args.micro_batch_size,
                on_progress=(lambda done: None) if shown is None else shown.update,
            )
        event = TaskEvaluated(
            iteration=trained.loaded.iteration,
            checkpoint=str(trained.loaded.folder),
            elapsed_s=time.perf_counter() - start,
            **figures,
        )
        trained.publish(event)
        if first:
            print(strict_json(event.as_record()) if args.format == "json" else event, flush=True)


def evaluate_with_lm_eval(args: argparse.Namespace, trained: Trained) -> None:
    """Run --lm-eval-tasks and print the results on rank 0."""
    from megatron.training.report.events import HarnessEvaluated

    try:
        from megatron_inference.harness import evaluate_harness, table
    except ImportError as error:
        raise ConfigError(
            f"--lm-eval-tasks needs lm-evaluation-harness, and {error}: pip install lm-eval"
        ) from error
    start = time.perf_counter()
    results = evaluate_harness(
        trained,
        args.lm_eval_tasks,
        include_path=args.lm_eval_include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        micro_batch_size=args.micro_batch_size,
    )
    event = HarnessEvaluated(
        iteration=trained.loaded.iteration,
        checkpoint=str(trained.loaded.folder),
        results=results,
        elapsed_s=time.perf_counter() - start,
    )
    trained.publish(event)
    if trained.topology.world.is_first:
        print(
            strict_json(event.as_record()) if args.format == "json" else table(results), flush=True
        )


def evaluate(args: argparse.Namespace, trained: Trained) -> None:
    """Evaluate and print the result on rank 0."""
    from megatron.model.gpt import hidden_state, stages_of
    from megatron.pipeline.executor import Executor
    from megatron.training.report.events import Evaluated
    from megatron.training.run.evaluation import mean_loss

    config = trained.config
    topology = trained.topology
    executor = Executor(
        topology,
        stages_of(trained.chunks),
        config.schedule,
        hidden_state(config),
    )
    start = time.perf_counter()
    first = topology.world.is_first
    with ExitStack() as stack:
        text = Input(args, trained)
        progress = stack.enter_context(ByteProgress("evaluate", text.size_bytes)) if first else None
        if progress is not None:
            progress.say(
                f" evaluating iteration {trained.loaded.iteration} on "
                f"{text.size_bytes / 1e6:.3f} MB"
            )
        measured = mean_loss(
            executor.evaluate, text.steps(progress, start), topology, per_token=True
        )
    assert measured is not None, "nothing interrupts it"
    loss, count = measured
    if not count:
        raise DataError(
            f"{', '.join(text.names)}: no token to predict: at least two are needed, or one if the "
            "tokenizer is known"
        )
    if not first:
        return
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {
        "checkpoint": str(trained.loaded.folder),
        "iteration": trained.loaded.iteration,
        "data": text.names,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * count / math.log(2) / text.bytes if text.bytes else None,
        "tokens": int(count),
        "bytes": text.bytes,
        "context": config.model.seq_length,
        "stride": text.stride,
        "seconds": seconds,
        "tokens_per_second": count / seconds,
    }
    trained.publish(Evaluated(**result))
    print(strict_json(result) if args.format == "json" else as_text(result), flush=True)


class Input:
    """The data of an evaluation, read once, in order.

    names       paths of the files, or prefixes of the token files
    size_bytes  total size of the files
    bytes       bytes of the text read so far, apart from first tokens that are not in the loss;
                valid on the first rank only; None if they cannot be counted without a tokenizer
    """

    def __init__(self, args: argparse.Namespace, trained: Trained) -> None:
        """Open the data. Raises ConfigError or DataError."""
        config = trained.config
        tokenizer = trained.tokenizer
        assert config.model.vocab_size is not None, "the model was built with a vocabulary"
        context = config.model.seq_length
        self.stride = args.stride or max(1, context // 2)
        if self.stride > context:
            raise ConfigError(
                f"--stride {self.stride} is greater than --context {context}: tokens between "
                f"windows would be left out; use at most {context}"
            )
        self.bytes: int | None = 0
        self._segments: Iterator[TokenSegment]
        if args.text is not None and tokenizer is None:
            raise ConfigError(
                f"{args.load} was trained without a tokenizer, so --text cannot be tokenized: give "
                "token files with --data-path"
            )
        if args.text is not None and tokenizer is not None:
            sources = tokens.text_sources(args.text)
            self.names = [source.path for source in sources]
            self.size_bytes = sum(source.size for source in sources)
            self._segments = tokens.text_segments(sources, args.json_key, tokenizer)
        else:
            self.names = args.data_path
            self.size_bytes = bin_bytes(args.data_path)
            count_bytes = trained.topology.world.is_first
            size = config.model.vocab_size
            self._segments = tokens.file_segments(
                args.data_path, size, tokenizer, count_bytes=count_bytes
            )
            kind = config.tokenizer.tokenizer_type
            opened = [IndexedDataset(prefix) for prefix in args.data_path]
            notices = check_tokenizer(opened, kind, tokenizer, size)
            for notice in notices if trained.topology.world.is_first else ():
                print(f"note: {notice}", file=sys.stderr, flush=True)
            if tokenizer is None:
                self.bytes = None
                if trained.topology.world.is_first:
                    print(
                        "note: no bits per byte, because the checkpoint has no tokenizer",
                        file=sys.stderr,
                        flush=True,
                    )
        self._before = self._after = (
            0,
            0,
        )  # tokens and bytes of the input up to the start and up to the end of the last segment
        # best-fit packing trains no prediction of a document's first token either
        self._masked = config.data.eod_mask_loss or config.data.data_packing == "best-fit"
        self._trained, self._windows = (
            trained,
            tokens.windows(self._token_arrays(), context, self.stride),
        )

    def _token_arrays(self) -> Iterator[npt.NDArray[Any]]:
        tokenizer = self._trained.tokenizer
        last = None
        for segment in self._segments:
            self._before = self._after
            self._after = self._before[0] + len(segment.tokens), segment.read_bytes
            if self.bytes is not None:
                self.bytes += segment.text_bytes or 0
            if self.bytes is not None and self._masked and tokenizer is not None:
                self.bytes -= tokens.first_bytes(segment.tokens, last, tokenizer)
                last = segment.tokens[-1] if len(segment.tokens) else last
            yield segment.tokens

    def steps(self, progress: ByteProgress | None, start: float) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches; all ranks get the same number."""
        topology = self._trained.topology
        size = self._trained.config.batch.micro_batch_size
        chunk = size * topology.layout.replicas  # windows of one micro-batch on all replicas
        count = 1 if topology.pipeline.size == 1 else _PER_STAGE * topology.pipeline.size
        offset = size * topology.replica
        predicted = 0
        while windows := list(islice(self._windows, chunk * count)):
            yield [
                self._micro_batch(windows[at + offset : at + offset + size], size)
                for at in range(0, len(windows), chunk)
            ]
            predicted += sum(window.stop - window.start for window in windows)
            if progress is not None:
                rate = predicted / (time.perf_counter() - start)
                (first, read), (last, read_then) = self._before, self._after
                done = np.interp(predicted, [first, last], [read, read_then])
                progress.update(int(done), f"{predicted} tokens, {rate:.0f} tokens/s")

    def _micro_batch(self, windows: Iterable[Window], size: int) -> MicroBatch:
        """Return up to `size` windows as a micro-batch; rows without a window do not count."""
        import torch

        from megatron.data.sampler import Separation, make_micro_batch

        config = self._trained.config
        tokenizer = self._trained.tokenizer
        context = config.model.seq_length
        data = config.data
        ids = np.zeros((size, context + 1), np.int64)
        counts = np.zeros((size, context), np.float32)
        lengths = [0] * size
        for row, window in enumerate(windows):
            ids[row] = window.tokens
            counts[row, window.start : window.stop] = 1.0
            lengths[row] = window.stop
        separation = dataclasses.replace(Separation.of(data, tokenizer), eod_mask_loss=self._masked)
        batch = make_micro_batch(ids, lengths=lengths, separation=separation)
        mask = batch.loss_mask * torch.from_numpy(counts)
        return dataclasses.replace(batch, loss_mask=mask).to(self._trained.topology.device)


def as_text(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    names = result["data"][:_SHOWN]
    more = len(result["data"]) - _SHOWN
    rows = [
        ("checkpoint", f"{result['checkpoint']} (iteration {result['iteration']})"),
        ("data", ", ".join(names) + (f" and {more} more" if more > 0 else "")),
        ("windows", f"{result['context']} tokens, every {result['stride']}"),
        ("tokens predicted", f"{result['tokens']:,}"),
        ("loss per token", f"{result['loss']:.6f}"),
        ("perplexity", f"{result['perplexity']:.6g}"),
    ]
    if result["bits_per_byte"] is not None:
        rows.append(("bytes of text", f"{result['bytes']:,}"))
        rows.append(("bits per byte", f"{result['bits_per_byte']:.6f}"))
    rate = result["tokens_per_second"]
    rows.append(("time", f"{result['seconds']:.1f} s, {rate:,.0f} tokens/s"))
    return "\n".join(f"{name:17} {value}" for name, value in rows)


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
