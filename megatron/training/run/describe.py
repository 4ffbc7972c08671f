"""The first screen of a run: model, machine, data and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron.config import Config
from megatron.config.help_text import render_differences
from megatron.data.datasets import SPLIT_NAMES, ContinuedData, Datasets
from megatron.data.forecast import check_data
from megatron.data.sampler import MicroBatchStream, Separation, Share
from megatron.data.tokenizer import Tokenizer
from megatron.errors import DataError
from megatron.kernels import choose
from megatron.model import formulas
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.report.reporter import Reporter
from megatron.training.run.host import device_name
from megatron.training.run.schedules import BatchSchedule, LengthSchedule, Progress


def describe_setup(
    config: Config,
    sizes: formulas.ModelSizes,
    topology: Topology,
    locations: Sequence[str],
    reporter: Reporter,
    host: Sequence[str],
) -> None:
    """Print the model, the machine, the settings, and where the run writes."""
    model = config.model
    say = reporter.console.say_wrapped
    assert model.vocab_size is not None, "the tokenizer was read"
    experts = ""
    if model.num_experts is not None:
        active = sizes.parameters(active=True)
        experts = (
            f" ({active:,} of them for each token, with {model.moe_router_topk} of "
            f"{model.num_experts} experts in {model.expert_layers} layers)"
        )
    say(
        f"model: {sizes.parameters():,} parameters{experts}: {model.num_layers} "
        f"layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, sequences of "
        f"{model.seq_length} tokens, vocabulary of {model.vocab_size}, padded to "
        f"{model.padded_vocab_size(topology.tensor.size)}"
    )
    reporter.say(topology.describe(locations))
    name = device_name(topology.device)
    per = "; TFLOPs, MFU and HFU are per GCD" if formulas.device_unit(name) == "GCD" else ""
    say(f"device: {name}, {config.precision.dtype_name}{per}")
    pieces = (f"your own {name}: {where}" for name, where in config.pieces.describe().items())
    kernels = choose.report(config, topology.device)
    if config.kernels.cuda_graph_impl is not None:
        how = "recorded as graphs" if topology.device.type == "cuda" else "rehearsed (not faster)"
        after = config.kernels.cuda_graph_warmup_steps
        kernels.append(f"captured passes: {how}, after {after} eager step(s)")
    for line in (*host, *kernels, *pieces, *(f"note: {notice}" for notice in config.notices)):
        say(line)
    logging = config.logging
    path = config.metrics_path
    locations_text = (
        ("checkpoints", config.checkpoint.save),
        ("the trained model", config.checkpoint.save_hf),
        ("metrics", path),
        ("TensorBoard's events", logging.tensorboard_dir),
        ("Weights & Biases' run", logging.wandb_project and f"project {logging.wandb_project}"),
        ("MLflow's run", logging.mlflow_tracking_uri or logging.mlflow_experiment_name),
    )
    written = [f"{what} to {where}" for what, where in locations_text if where]
    say(f"writes {', '.join(written) or 'nothing, because there is no --save FOLDER'}")
    hint = "--print-config shows all" if path is None else f"all: {path.parent / 'settings.toml'}"
    say(f"settings that differ from the defaults ({hint}):")
    for line in render_differences(config):
        say(f"  {line}")


def describe_length(
    config: Config,
    batches: BatchSchedule,
    datasets: Datasets,
    progress: Progress,
    end: int,
    tokens: int,
    reporter: Reporter,
) -> None:
    """Print the length of the remaining training; `tokens` are those of the whole run."""
    training = config.training
    if training.skip_train or progress.iteration >= end:
        return
    before = progress.consumed_samples
    samples = progress.samples_at(batches, end) - before
    evaluated = ""
    if datasets.valid is not None and training.eval_iters:
        size = training.eval_iters * batches.global_batch_size_at_end
        evaluated = f"; evaluation on {size:,} samples every {training.eval_interval} iterations"
    reporter.console.say_wrapped(
        f"training: iterations {progress.iteration + 1} to {end}, {samples:,} samples, "
        f"{tokens - progress.consumed_tokens:,} tokens{evaluated}",
    )
    full = config.model.seq_length
    stretches = LengthSchedule.from_config(config).stretches(
        batches, progress.iteration, before, end
    )
    if cut := sum((full - length) * number for length, _, number in stretches):
        reporter.console.say_wrapped(
            f"note: data: curriculum_learning leaves out {cut:,} tokens from now on: of each sample of "
            f"{full} tokens, only the first ones are trained on while sequences are shorter"
        )


def report_data(
    config: Config,
    tokenizer: Tokenizer | None,
    samples: int,
    staged: Mapping[str, str],
    say: Callable[[str], None],
    continued: ContinuedData | None = None,
) -> None:
    """Check the data against the tokenizer, and print the findings and the run's epochs.

    The arguments are those of `check_data`.
    """
    forecast, notices = check_data(config, tokenizer, samples, staged, continued)
    if forecast.sources:
        say("\n     ".join([f" > the run reads {forecast.summary}", *forecast.table]))
    for note in (*notices, *([forecast.warning] if forecast.warning else ())):
        say(f" note: {note}")


def describe_data(config: Config, datasets: Datasets, reporter: Reporter) -> None:
    """Print the number of samples of each data set, and notes on padding and missing data."""
    by_name = {name: getattr(datasets, name) for name in SPLIT_NAMES}
    if datasets.corpora:
        del by_name["valid"]
        by_name |= {f"valid {name}": corpus for name, corpus in datasets.corpora.items()}
    listed = ", ".join(
        f"{name} {len(dataset) if dataset is not None else 'none'}"
        for name, dataset in by_name.items()
    )
    reporter.say(f" > samples of {config.model.seq_length} tokens: {listed}")
    if datasets.train is not None and config.data.loss_mask in ("required", "optional"):
        masked = [source.masked for source in datasets.train.sources]
        reporter.say(
            f" > loss masks: {sum(masked)} of {len(masked)} sources of training data have one, "
            "and only the tokens that it marks count in the loss"
        )
    if datasets.train is not None and config.data.data_packing == "best-fit":
        padding = {s.name: 100 * s.waste for s in datasets.train.sources if s.waste is not None}
        if padding:
            most = max(padding, key=padding.__getitem__)
            reporter.say(
                f" > packed by best fit: padding is up to {padding[most]:.3f} % of the tokens of a "
                f"source (the most in {most})"
            )
    if datasets.valid is None and not datasets.corpora and config.training.eval_iters:
        reporter.say(
            " note: no validation data, so no validation loss: see --split and --valid-data-path"
        )


_LOOKED_AT = 500  # largest number of samples of a data set that are checked


def check_loss_masks(
    config: Config,
    topology: Topology,
    datasets: Datasets,
    samples: Sequence[int],
    tokenizer: Tokenizer | None,
    reporter: Reporter,
) -> None:
    """Print how many samples have no token in the loss, if masks may exclude all their tokens.

    `samples` has the number that the run reads of each of its three data sets. If there are many,
    rank 0 checks only evenly spaced ones. Raises DataError on all ranks if none of the training
    samples that were checked has a token in the loss, or if a sample cannot be read.
    """
    length = config.model.seq_length
    sets = {name: getattr(datasets, name) for name in SPLIT_NAMES} | dict(datasets.corpora)
    limits = dict(zip(SPLIT_NAMES, samples, strict=True))
    separation = Separation.of(config.data, tokenizer)
    problem = ""
    try:
        for name, dataset in sets.items() if topology.world.is_first else ():
            if dataset is None or not (
                config.data.eod_mask_loss or any(source.masked for source in dataset.sources)
            ):
                continue
            first = dataset.first
            among = min(len(dataset), limits.get(name, len(dataset))) - first
            looked = min(among, _LOOKED_AT)
            stream = MicroBatchStream(
                dataset, Share(1), separation=separation, vocab_size=config.model.vocab_size
            )
            without = 0
            for number in range(looked):
                stream.consumed_samples = first + number * among // looked
                (batch,) = stream.take(1)
                without += not batch.loss_mask.any()
            line = f"{without} of {looked} {name} samples have no token in the loss"
            if looked < among:
                line += f" (a check of evenly spaced samples among {among})"
            if 0 < without == looked and name == "train":
                problem = (
                    f"{line}: prompts fill all of --seq-length {length}, or the loss mask marks "
                    "nothing. Raise --seq-length, shorten the prompts, or leave out --loss-mask"
                )
            elif without:
                reporter.say(f"WARNING: {line}: they add nothing to training or evaluation")
    except DataError as error:
        problem = str(error)
    if problem := collectives.broadcast_object(problem, topology.world):
        raise DataError(problem)
