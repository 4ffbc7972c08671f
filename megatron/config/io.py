"""Settings for tokenizer, data, checkpoints and logging."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config.option import (
    COUNT,
    FACTOR,
    MOST_PROCESSES,
    MOST_WIDTH,
    NATURAL,
    WIDTH,
    Range,
    option,
)
from megatron.config.phases import number

_NO_RANDOM_STATES = (
    "checkpoints need no generator states: data order and dropout masks follow from --seed and "
    "the number of consumed samples"
)


@dataclass(frozen=True)
class BlendSource:
    """A data set in a blend.

    corpus      name of the validation corpus that the blend is; "" if the split is one blend
    start, end  the documents that are used, as shares of their number
    """

    weight: float
    prefix: str
    corpus: str = ""
    start: float = 0.0
    end: float = 1.0

    @property
    def documents(self) -> str:
        """Return the documents that are used as text; "" for all of them."""
        return "" if (self.start, self.end) == (0, 1) else f"{self.start}:{self.end}"


Blend = tuple[BlendSource, ...]
"""Data sets of weights other than 0, which add up to 1; in each corpus, if corpora are named."""
# A NAME has no /, so that ./a=b is the file a=b.
_NAMED = re.compile(r"([^/=]*)=(.*)", re.DOTALL)
_PART = re.compile(r"(.*)@([0-9.][0-9.e-]*):([0-9.][0-9.e-]*)", re.DOTALL)


def parse_blend(words: Sequence[str], *, named: bool = False) -> Blend:
    """Return the data sets in the words of --train-data-path and its siblings. Raises ValueError.

    `named` is true for --valid-data-path: words may have the names of corpora.

    >>> parse_blend(["3", "a@0:0.95", "1", "b"])[0]
    BlendSource(weight=0.75, prefix='a', corpus='', start=0.0, end=0.95)
    >>> [(s.corpus, s.prefix) for s in parse_blend(["web=data/web", "code=data/b"], named=True)]
    [('web', 'data/web'), ('code', 'data/b')]
    """
    weighted = len(words) > 1 and not (named and "=" in words[0])
    usage = (
        "give one PREFIX, or pairs WEIGHT PREFIX WEIGHT PREFIX ..., or names for all: NAME=PREFIX"
    )
    if weighted and len(words) % 2:
        raise ValueError(usage)
    weights = words[::2] if weighted else ["1"] * len(words)
    sources = []
    for weight, word in zip(weights, words[1::2] if weighted else words, strict=True):
        name, prefix, start, end = "", word, "0", "1"
        if named and (match := _NAMED.fullmatch(word)):
            name, prefix = match.groups()
            if not (prefix and re.fullmatch(r"[\w.-]+", name)):
                raise ValueError(
                    f"{word!r} is not NAME=PREFIX, with a NAME of letters, digits and ._-"
                )
        if match := _PART.fullmatch(prefix):
            prefix, start, end = match.groups()
        try:
            source = BlendSource(float(weight), prefix, name, float(start), float(end))
        except ValueError:
            raise ValueError(usage) from None
        if not source.start < source.end <= 1:
            raise ValueError(f"{word!r}: a part is START:END with 0 <= START < END <= 1")
        sources.append(source)
    names = Counter(source.corpus for source in sources)
    for source in sources:
        if not source.corpus and (len(names) > 1 or 1 < len(words) == len(sources)):
            raise ValueError(f"{source.prefix!r} has no NAME=: name all corpora, or none")
        if not weighted and names[source.corpus] > 1:
            raise ValueError(
                f"{source.corpus!r} is the name of {names[source.corpus]} corpora: choose others, or "
                "give pairs WEIGHT NAME=PREFIX for a blend"
            )
    return normalised(sources)


def parse_blend_schedule(text: str) -> tuple[tuple[int, Blend], ...]:
    """Return the (tokens, blend) of each phase in --blend-schedule. Raises ValueError.

    A phase holds from this number of tokens of the run on.

    >>> [(tokens, [s.prefix for s in blend]) for tokens, blend in parse_blend_schedule("0: a, 9K: b")]
    [(0, ['a']), (9000, ['b'])]
    """
    phases = list[tuple[int, Blend]]()
    for written in filter(None, map(str.strip, re.split("[,\n]", text))):
        threshold, colon, words = written.partition(":")
        if not (colon and words.split()):
            raise ValueError(
                f"'{written}' is not TOKENS: WEIGHT NAME WEIGHT NAME ..., such as 0: 0.7 web 0.3 code"
            )
        try:
            tokens = int(number(threshold.strip()))
            blend = parse_blend(words.split())
        except ValueError as error:
            raise ValueError(f"'{written}': {error}") from None
        if phases and tokens <= phases[-1][0]:
            raise ValueError(f"'{written}' must begin after the {phases[-1][0]:,} tokens before it")
        phases.append((tokens, blend))
    if not phases:
        raise ValueError("it has no phase, such as 0: 0.7 web 0.3 code")
    return tuple(phases)


def normalised(sources: Sequence[BlendSource]) -> Blend:
    """Return a blend of data sets with any weights. Raises ValueError if a corpus has none above 0."""
    blend = list[BlendSource]()
    for name in dict.fromkeys(source.corpus for source in sources):
        corpus = [source for source in sources if source.corpus == name]
        total = sum(source.weight for source in corpus)
        if not 0 < total < math.inf or min(source.weight for source in corpus) < 0:
            raise ValueError("weights must be at least 0 and not all 0")
        blend += [replace(each, weight=each.weight / total) for each in corpus if each.weight]
    return tuple(blend)


def hugging_face_folder(load: str | None) -> Path | None:
    """Return the FOLDER in --load hf:FOLDER; None for any other value.

    >>> hugging_face_folder("hf:models/a"), hugging_face_folder("runs/a")
    (PosixPath('models/a'), None)
    """
    prefix = "hf:"
    has_prefix = load is not None and load.startswith(prefix)
    return Path(str(load).removeprefix(prefix)) if has_prefix else None


def is_same_folder(one: str | None, other: str | None) -> bool:
    """Return whether two settings name the same folder, without looking at the file system.

    >>> is_same_folder("runs/a", "./runs/a/"), is_same_folder(None, None)
    (True, False)
    """
    if one is None or other is None:
        return False
    return os.path.abspath(one) == os.path.abspath(other)


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer and its files."""

    tokenizer_type: str | None = option(
        None,
        "Tokenizer type.",
        choices="GPT2BPETokenizer SentencePieceTokenizer GPTSentencePieceTokenizer "
        "Llama2Tokenizer HFTokenizer TikTokenizer NullTokenizer",
        value_names="huggingfacetokenizer=HFTokenizer pretrainedfromhf=HFTokenizer "
        "tokenizerfromfile=HFTokenizer tokenizerfromfilewithfim=HFTokenizer "
        "qwen2tokenizer=HFTokenizer llama3tokenizer=TikTokenizer",
        implies={"llama3tokenizer": {"tiktoken_pattern": "llama3"}},
        hint="use HFTokenizer for any Hugging Face tokenizer, TikTokenizer for the tokenizer.model "
        "of Llama 3",
        derived="GPT2BPETokenizer with --vocab-file and --merge-file",
    )
    tokenizer_model: str | None = option(
        None,
        "SentencePiece model, Hugging Face tokenizer.json or its folder, .tiktoken file, or JSON "
        "vocabulary of a TikTokenizer.",
        metavar="PATH",
        flags="--tokenizer-model --tokenizer-name-or-path --tokenizer-file --hf_tokenizer_path",
    )
    vocab_file: str | None = option(None, "vocab.json of a GPT-2 tokenizer.", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt of a GPT-2 tokenizer.", metavar="FILE")
    vocab_extra_ids: int = option(
        0, "Extra ids at the end of a SentencePieceTokenizer's vocabulary.", Range(0, MOST_WIDTH)
    )
    tiktoken_pattern: str | None = option(
        None,
        "Pre-tokenization pattern of a TikTokenizer.",
        choices="v1 v2 gpt2 cl100k llama3 o200k",
        derived="v2 for a JSON vocabulary; the publisher's for a published .tiktoken file",
    )
    tiktoken_num_special_tokens: int | None = option(
        None,
        "Number of ids that a TikTokenizer reserves for special tokens.",
        WIDTH,
        derived="1000 for a JSON vocabulary; for a .tiktoken file the number of special tokens",
    )
    tiktoken_special_tokens: tuple[str, ...] | None = option(
        None,
        "Special tokens of a TikTokenizer, in id order.",
        metavar="NAME",
        flags="--tiktoken-special-tokens --tokenizer-special-tokens",
        derived="<unk> <s> </s> <mask> <pad> <cls> <sep> for a JSON vocabulary; the publisher's "
        "for a published .tiktoken file; <|endoftext|> for another one",
    )


@dataclass(frozen=True)
class DataConfig:
    """Training data and options for reading it."""

    data_path: tuple[str, ...] | None = option(
        None,
        "Prefix of .bin and .idx files, or a blend: WEIGHT PREFIX pairs.",
        metavar="[WEIGHT] PREFIX ...",
        syntax=parse_blend,
    )
    data_file_list: str | None = option(
        None, "File with lines 'weight prefix [corpus]', instead of --data-path.", metavar="FILE"
    )
    split: str = option("969, 30, 1", "Proportions of the training, validation and test splits.")
    train_data_path: tuple[str, ...] | None = option(
        None,
        "Training data: a prefix, or WEIGHT PREFIX pairs. PREFIX@START:END is a part of a file: "
        "a@0:0.95 has the first 95 % of its documents.",
        metavar="[WEIGHT] PREFIX ...",
        syntax=parse_blend,
    )
    valid_data_path: tuple[str, ...] | None = option(
        None,
        "Validation data: as --train-data-path, or corpora that are evaluated and reported "
        "separately, on the same samples every time: NAME=PREFIX words, or WEIGHT NAME=PREFIX pairs "
        "for corpora that are blends. Write ./A=B for a file whose name has an =.",
        metavar="[WEIGHT] PREFIX ...",
        syntax=functools.partial(parse_blend, named=True),
    )
    test_data_path: tuple[str, ...] | None = option(
        None,
        "Test data, as --train-data-path.",
        metavar="[WEIGHT] PREFIX ...",
        syntax=parse_blend,
    )
    blend_schedule: str | None = option(
        None,
        "Blends of the training data by tokens of the run: phases TOKENS: WEIGHT NAME WEIGHT NAME "
        "..., separated by commas or line ends, such as '0: 0.7 web 0.3 code, 900B: 0.5 code 0.5 "
        "math'. NAME is a prefix, or that of a source of --data-path, --train-data-path or "
        "--data-file-list without its folder and _text_document. Before the first phase the weights of "
        "these flags hold; if it begins at 0, they can be left out.",
        metavar="PHASES",
        syntax=parse_blend_schedule,
    )
    data_order: str = option(
        None,
        "Order of the samples of data files. stream: each source is a stream, which a resumed run "
        "continues whatever changes, so that no token of an epoch is repeated or lost. megatron: "
        "the order of Megatron-LM, to the bit; after a change of length, blend, batch or packing it "
        "repeats and skips data.",
        choices="stream megatron",
        derived="stream; megatron with --train-data-exact-num-epochs or --dataloader-type cyclic; "
        "that of the checkpoint for a resumed run",
    )
    allow_data_changes: tuple[str, ...] = option(
        (),
        "Changes of the data that a resumed run accepts: another seed, another split, or other files "
        "of a source. Without this flag such a change is an error that says what follows from it.",
        choices="seed split files",
        one_start=True,
    )
    max_epochs: float | None = option(
        None,
        "Refuse a run that reads a source of its training data more often than this. Without this "
        "flag there is a warning beyond 16 epochs.",
        FACTOR,
    )
    train_data_exact_num_epochs: int | None = option(
        None,
        "Read the training data as exactly N epochs, shuffled together, even if the run is "
        "shorter. A longer run needs --dataloader-type cyclic. Not for blends.",
        Range(1, 10**5),
    )
    mock_data: bool = option(False, "Use synthetic data.")
    data_cache_path: str | None = option(
        None,
        "Folder for new index files, instead of index-cache next to the data, which is still read. "
        "Required if index-cache lacks an index and is read-only.",
        metavar="FOLDER",
    )
    stage_data_to: str | None = option(
        None,
        "Copy the data to this folder on each node's disk before training, as far as it fits. "
        "Environment variables ($NAME) are expanded.",
        metavar="FOLDER",
    )
    data_packing: str = option(
        "concat",
        "How documents are packed into samples. concat: concatenate documents and cut them. "
        "best-fit: keep documents whole if they fit into a sample, pad samples, and separate "
        "documents, as with --reset-position-ids and --reset-attention-mask.",
        choices="concat best-fit",
    )
    num_workers: int = option(
        2,
        "Number of threads that read data ahead. 0: read at the start of each step.",
        Range(0, 512),
    )
    dataloader_type: str = option(
        None,
        "single: one pass over the samples. cyclic: repeated passes, each in a new order.",
        choices="single cyclic",
        derived="single",
    )
    data_sharding: bool = option(
        True,
        "Shard the data over the ranks with --dataloader-type cyclic.",
        inert="every rank always draws from the whole data set, so that the order does not depend "
        "on the number of ranks",
    )
    reset_position_ids: bool = option(
        False, "Restart position ids after each end-of-document token."
    )
    reset_attention_mask: bool = option(
        False,
        "Restrict the attention of each token to its own document.",
        flags="--reset-attention-mask --dataloader-inter-document-masking",
    )
    eod_mask_loss: bool = option(
        False,
        "Exclude positions whose input is an end-of-document token from the loss: their labels "
        "begin other documents.",
    )
    loss_mask: str | None = option(
        None,
        "How to use the loss masks next to the data, which tools/preprocess_data.py --chat writes "
        "for fine-tuning: PREFIX_mask.bin and .idx. required: every data set must have one, and "
        "only the tokens that it marks count in the loss. optional: all tokens of a data set "
        "without one count. ignore: all tokens of all data sets count. Without this flag, data "
        "with a mask is refused.",
        choices="required optional ignore",
    )
    fim_rate: float = option(
        0.0,
        "Fill-in-the-middle: probability that a document of the training data is rearranged to "
        "prefix, suffix, middle, in its share of a sample. --fim-data alone means 0.5.",
        Range(0, 1),
        weak_shortcuts={"--fim-data": 0.5},
    )
    fim_spm_rate: float = option(
        0.5, "Share of the rearranged documents that begin with the suffix.", Range(0, 1)
    )
    fim_split_sample: str | None = option(
        None,
        "Token between the files of a document, which are then rearranged one by one.",
        metavar="TOKEN",
    )
    fim_fragment_rate: float = option(
        0.5,
        "Probability that a file is rearranged, in documents that are, with --fim-split-sample.",
        Range(0, 1),
        flags="--fim-fragment-rate --fragment-fim-rate",
    )
    fim_no_prefix: str | None = option(
        None, "Leave documents and files that begin with this text as they are.", metavar="TEXT"
    )
    fim_prefix_token: str = option("<fim_prefix>", "Token before the prefix.", metavar="TOKEN")
    fim_middle_token: str = option("<fim_middle>", "Token before the middle.", metavar="TOKEN")
    fim_suffix_token: str = option("<fim_suffix>", "Token before the suffix.", metavar="TOKEN")
    fim_pad_token: str = option(
        "<fim_pad>", "Token that fills samples, outside of the loss.", metavar="TOKEN"
    )
    fim_eod_token: str | None = option(
        None,
        "Token that ends documents: the tokenizer's.",
        metavar="TOKEN",
        derived="the tokenizer's",
    )
    goldfish_loss: bool = option(
        False,
        "In training, exclude from the loss the tokens that a hash of the --goldfish-h tokens "
        "before them selects, one in --goldfish-k, so that no text can be learned by heart.",
    )
    goldfish_k: int = option(50, "Goldfish loss: one in K tokens is excluded.", Range(2, 10**6))
    goldfish_h: int = option(
        50, "Goldfish loss: number of tokens that the hash covers.", Range(1, 10**4)
    )
    mmap_bin_files: bool = option(True, "Memory-map .bin files.")

    @property
    def uses_split(self) -> bool:
        """Return whether --split divides the data into training, validation and test data."""
        return not (self.train_data_path or self.valid_data_path or self.test_data_path)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = option(None, "Folder to save checkpoints to.", metavar="FOLDER")
    save_interval: int | None = option(
        None,
        "Number of iterations between checkpoints.",
        COUNT,
        flags="--save-interval --persistent-save-interval",
    )
    save_interval_minutes: float | None = option(
        None,
        "Minutes between checkpoints, alone or in addition to --save-interval.",
        Range(above=0),
        metavar="MINUTES",
    )
    save_trigger_file: str | None = option(
        None,
        "Save once this file exists, then remove it.",
        metavar="FILE",
        one_start=True,
    )
    async_save: bool = option(
        False, "Save in the background: training stops only while the state is copied."
    )
    non_persistent_save_interval: int | None = option(
        None,
        "With --max-restarts, number of iterations between local checkpoints: copies of the state in "
        "the memory of each node and of another one, from which a restart within the job continues. "
        "auto: as often as costs at most 1 % of the time. Unset: none.",
        COUNT,
        metavar="N|auto",
        value_names={"auto": 0},
        hint="leave it out for none, or give auto",
        one_start=True,
    )
    non_persistent_ckpt_type: str = option(
        "local",
        "Kind of the checkpoints of --non-persistent-save-interval.",
        choices="local",
        hint="local checkpoints are the only kind, in host memory: use local",
        inert="local checkpoints are the only kind",
    )
    replication: bool = option(
        True, "Keep a copy of local checkpoints in the memory of other nodes.", one_start=True
    )
    replication_factor: int = option(
        2,
        "Number of nodes whose memory has a rank's part of a local checkpoint: 2, or 1 for none but "
        "its own.",
        choices=(1, 2),
        one_start=True,
    )
    replication_jump: int | None = option(
        None,
        "Keep the copy of rank r's part of a local checkpoint on rank r + J.",
        COUNT,
        metavar="J",
        derived="number of ranks per node",
        one_start=True,
    )
    keep_last: int | None = option(
        None, "Keep the newest N checkpoints and remove older ones. Unset: keep all.", COUNT
    )
    keep_every: int | None = option(
        None,
        "With --keep-last, also keep checkpoints whose iteration is a multiple of N.",
        COUNT,
        flags="--keep-every --save-retain-interval",
        # Megatron-LM keeps the newest checkpoint in addition to these.
        implies={"--save-retain-interval": {"keep_last": 1}},
    )
    no_save_optim: bool = option(False, "Do not save the optimizer state.")
    no_save_rng: bool = option(
        False, "Do not save random number generator states.", inert=_NO_RANDOM_STATES
    )
    save_hf: str | None = option(
        None,
        "Folder, which must not exist yet, for the trained model in Hugging Face's format. It is "
        "written at the end of training, but not if the run stops earlier.",
        metavar="FOLDER",
        of_folder=True,
    )
    save_hf_ema: bool = option(
        False,
        "With --save-hf, write the average of the weights (--ema-decay) instead of the weights.",
        of_folder=True,
    )
    load: str | None = option(
        None,
        "Folder to load the latest checkpoint from. hf:FOLDER: load weights, model settings and, "
        "unless given, the tokenizer from a Hugging Face model; training starts at iteration 0.",
        metavar="FOLDER",
        one_start=True,
    )
    model_from: str | None = option(
        None,
        "Hugging Face folder, or a config.json alone, from which a new model with random weights "
        "takes its settings and, if there is one, its tokenizer, unless they are given.",
        metavar="PATH",
        one_start=True,
    )
    load_tag: str | None = option(
        None,
        "Name or iteration of the checkpoint to load, instead of the latest.",
        flags="--load-tag --load-iteration",
        one_start=True,
    )
    load_missing: tuple[str, ...] = option(
        (),
        "Parameters that the model of --load may lack, as patterns of their names (see --freeze): "
        "they start anew. LoRA's adapters always may be missing.",
        metavar="PATTERN ...",
        one_start=True,
    )
    no_load_optim: bool = option(False, "Do not load the optimizer state.", one_start=True)
    no_load_rng: bool = option(
        False,
        "Do not load random number generator states.",
        inert=_NO_RANDOM_STATES,
        one_start=True,
    )
    finetune: bool = option(False, "Load weights only, and start at iteration 0.", one_start=True)
    reset_iteration: bool = option(
        False, "Load the whole checkpoint, but start at iteration 0.", one_start=True
    )
    use_checkpoint_args: bool = option(
        False,
        "Take the architecture of the model from the checkpoint of --load, with the number of "
        "learned positions, and, unless they are given, the sequence length, dropout and tokenizer.",
        one_start=True,
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        "Exit with an error if --load has no checkpoint, instead of starting from scratch.",
        one_start=True,
    )
    override_opt_param_scheduler: bool = option(
        False,
        "Use the schedules of this run instead of the checkpoint's, as by default, but without a "
        "note about the differences.",
        flags="--override-opt_param-scheduler --override-opt-param-scheduler "
        "--override-lr-scheduler",
        one_start=True,
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Use the schedules of learning rate, weight decay and betas of the checkpoint's run "
        "instead of this run's.",
        flags="--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler "
        "--use-checkpoint-lr-scheduler",
    )
    ckpt_format: str = option(
        "torch_dist",
        "Checkpoint format.",
        choices="torch_dist",
        value_names="torch=torch_dist torch_dcp=torch_dist zarr=torch_dist fsdp_dtensor=torch_dist",
        flags="--ckpt-format --dist-ckpt-format",
        inert="checkpoints have one format, which loads on any layout; --load also reads other "
        "frameworks' formats",
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Logging, trackers and profiling."""

    log_interval: int = option(100, "Number of iterations between log lines.", COUNT)
    metrics_file: str | None = option(
        None,
        "JSON lines file for all metrics, in full precision.",
        metavar="FILE",
        derived="metrics.jsonl in the --save folder",
        of_folder=True,
    )
    tensorboard_dir: str | None = option(
        None, "Folder for TensorBoard events.", metavar="FOLDER", of_folder=True
    )
    tensorboard_log_interval: int = option(
        1, "Number of iterations between the steps that have their own entries in trackers.", COUNT
    )
    tensorboard_queue_size: int = option(
        1000, "Number of TensorBoard entries to buffer.", Range(1, 10**6)
    )
    log_params_norm: bool = option(False, "Log the norm of the parameters.")
    moe_per_layer_logging: bool = option(
        False,
        "Log the balance of each layer with experts: largest load, entropy, share of dropped "
        "choices and, in the metrics file, the tokens of each expert.",
    )
    log_num_zeros_in_grad: bool = option(False, "Log the number of zeros in the gradient.")
    timing_log_level: int = option(
        0, "Timer detail. 0: none. 1: the parts of a step. 2: same as 1.", choices=(0, 1, 2)
    )
    timing_log_option: str = option(
        "minmax", "How timers are combined over ranks.", choices="max minmax all"
    )
    straggler_report: bool = option(
        False,
        "At each log line, log the minimum, median and maximum over ranks of the computing time of "
        "a step, and name slow ranks.",
        flags="--straggler-report --log-straggler",
    )
    wandb_project: str | None = option(
        None,
        "Weights & Biases project to log to. WANDB_MODE=offline needs no network.",
        flags="--wandb-project --wandb-project-name",
        metavar="NAME",
    )
    wandb_exp_name: str | None = option(
        None,
        "Weights & Biases run name.",
        flags="--wandb-exp-name --wandb-run-name --wandb-name",
        metavar="NAME",
        derived="name of the --save folder",
        of_folder=True,
    )
    wandb_entity: str | None = option(
        None,
        "Weights & Biases user or team.",
        flags="--wandb-entity --wandb-entity-name",
        metavar="NAME",
    )
    wandb_save_dir: str | None = option(
        None,
        "Folder in which Weights & Biases creates the folder wandb for its files.",
        metavar="FOLDER",
        derived="the --save folder, else the current folder",
        of_folder=True,
    )
    mlflow_tracking_uri: str | None = option(
        None,
        "MLflow server or store to log to, such as sqlite:///FILE.",
        metavar="URI",
        derived="variable MLFLOW_TRACKING_URI",
    )
    mlflow_experiment_name: str | None = option(
        None,
        "MLflow experiment to log to. MLflow is on if this flag or --mlflow-tracking-uri is given.",
        metavar="NAME",
        derived="megatron",
    )
    mlflow_run_name: str | None = option(
        None,
        "MLflow run name.",
        metavar="NAME",
        derived="name of the --save folder",
        of_folder=True,
    )
    callback: tuple[str, ...] | None = option(
        None,
        "Your own megatron.Callback classes, each created without arguments (docs/extending.md).",
        metavar="MODULE:CLASS ...",
        names_code=True,
    )
    profile: str | None = option(
        None,
        "Run the torch profiler. pt-full also records shapes, stacks and memory.",
        choices="pt pt-full",
        implied="pt",
        one_start=True,
    )
    profile_step_start: int = option(
        10, "First iteration to profile, counted from 0.", NATURAL, one_start=True
    )
    profile_step_end: int = option(
        12,
        "Iteration before which profiling stops, counted from 0.",
        COUNT,
        one_start=True,
    )
    profile_ranks: tuple[int, ...] = option(
        (0,), "Ranks to profile.", Range(0, MOST_PROCESSES), metavar="RANK ...", one_start=True
    )
    trace_dir: str | None = option(
        None,
        "Folder for profiler traces.",
        metavar="FOLDER",
        flags="--trace-dir --path-for-traces",
        derived="--tensorboard-dir, else the folder of the metrics file, else the current folder",
        of_folder=True,
    )
    record_memory_history: bool = option(
        False,
        "On --profile-ranks, record which code allocates GPU memory, and write a snapshot when the "
        "run ends.",
        one_start=True,
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "File for memory snapshots, in the folder of the traces; the rank is added to its name.",
        metavar="FILE",
    )
    timeline_interval: int | None = option(
        None,
        "Number of iterations between steps whose timeline is recorded. The last step is "
        "recorded, too. 0: none. With --timing-log-level or --straggler-report, it is always "
        "--log-interval.",
        NATURAL,
        derived="--log-interval, at least 10",
    )
