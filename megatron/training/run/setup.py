"""Set-up of a run, in order: processes, layout, tokenizer, data, model, engine, checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.export import export_problem
from megatron.checkpoint.settings import checkpoint_bytes
from megatron.config import Config
from megatron.config.duration import duration_s
from megatron.config.files import hugging_face_folder
from megatron.config.help_text import differences, render_differences
from megatron.config.settings_file import render_settings, write_settings
from megatron.data.datasets import (
    SPLIT_NAMES,
    Datasets,
    build_datasets,
    check_data,
    describe_epochs,
)
from megatron.data.file_lock import FolderClaim
from megatron.data.gpt_dataset import BlendedDataset, FileDataset, Source, TokenDataset
from megatron.data.limited_tokenizer import LimitedTokenizer
from megatron.data.packed_dataset import PackedDataset
from megatron.data.sampler import Ledger, MicroBatchStream, sample_order, sources
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.engine.engine import Engine, build_executor
from megatron.errors import ConfigError, DataError, LaunchError, LostRankError, MegatronError
from megatron.kernels import choose
from megatron.model import formulas
from megatron.model.gpt import build_chunks, layer_context
from megatron.model.stages import assign_layers, recomputed_layers
from megatron.parallel import collectives
from megatron.parallel.collectives import use_groups
from megatron.parallel.launch import Launch
from megatron.parallel.layout import DEFAULT_ORDER, Sizes
from megatron.parallel.participants import compare
from megatron.parallel.placing import Placing, RankPlan
from megatron.parallel.rendezvous import Rendezvous, connect
from megatron.parallel.topology import Topology
from megatron.protocols import Callback
from megatron.training.report.energy import EnergyMeter
from megatron.training.report.events import Start
from megatron.training.report.metrics import Interval, Profiler, Rates, Timers
from megatron.training.report.reporter import Console, Reporter
from megatron.training.report.timeline import Timeline
from megatron.training.run.callbacks import (
    DataLedger,
    EmptySteps,
    Recorder,
    Routers,
    SameCopies,
    SlowRanks,
    TimeLeft,
)
from megatron.training.run.checkpoints import (
    Saves,
    check_save_folder,
    checkpoint_to_load,
    load_checkpoint,
)
from megatron.training.run.data import first_alone, first_builds, open_stream, staged_locations
from megatron.training.run.evaluation import Losses, Tasks
from megatron.training.run.host import (
    agree_on_times,
    check_kernels,
    device_name,
    mapped_blocks,
    share_cores,
    tune_allocator,
)
from megatron.training.run.identity import identity, sample_digests
from megatron.training.run.loop import train
from megatron.training.run.process import Signals
from megatron.training.run.provenance import Provenance, layout_record, versions
from megatron.training.run.resume import (
    describe_resume,
    stored_settings,
    with_checkpoint_settings,
)
from megatron.training.run.schedules import (
    BatchSchedule,
    Costs,
    Progress,
    Schedules,
    planned_samples,
    run_costs,
    total_iterations,
)
from megatron.training.run.state import LoopState, Run
from megatron.training.run.stopping import Agreement, SlurmEnd, StopRules, WallTime, requeue
from megatron.training.run.tasks import Task, context_of, read_tasks
from megatron.training.safety.watchdog import Watchdog

_FIRST_SHARE = 0.9  # of --distributed-timeout-minutes


def run_training(
    config: Config,
    launch: Launch,
    signals: Signals,
    started: float,
    renumbered: Callable[[int], object] | None,
    environment: Sequence[str],
    ranks: RankPlan | None,
) -> None:
    """Connect, assemble, train, disconnect. See megatron.pretrain.

    `signals` are entered already; `started` is when the program began, by time.monotonic, for
    --walltime. `environment` are lines for the log (see
    megatron.parallel.environment.job_environment). `ranks` is their placement on a known machine;
    without it only --rank-order and --device-order have an effect.
    """
    save = config.checkpoint.save
    claim = FolderClaim(Path(save), f"--save {save}") if save else None
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if ranks is None:
        order = config.parallel.rank_order or DEFAULT_ORDER
        ranks = RankPlan(Placing(config.parallel.device_order or (), rank_order=order))
    alike = identity(config, ranks.placing.agreed) if launch.world_size > 1 else None
    shown = Console(launch.rank == 0).doing(f"connecting {launch.world_size} process(es)")
    with shown:
        backend = config.parallel.distributed_backend
        rendezvous = connect(launch, timeout, backend, ranks.placing, alike)
    launch = rendezvous.launch
    if renumbered is not None:
        renumbered(launch.rank)
    run: Run | None = None
    try:
        host = set_up_host(config, rendezvous.device, launch)
        # Only rank 0 prints the places: the list read by thousands of ranks would burden the store.
        places = rendezvous.places if launch.rank == 0 else ()
        if launch.rank == 0:
            host = [
                *ranks.describe(),
                *(f"note: {notice}" for notice in rendezvous.notices),
                *environment,
                *host,
            ]
        topology = connect_groups(config, rendezvous, timeout, ranks.placing.rank_order)
        if claim is not None:
            # imports torch's checkpoints, which takes long
            from megatron.checkpoint.together import decided_by_first

            decided_by_first(topology, partial(claim.take, partial(print, flush=True)))
        watchdog = build_watchdog(config, topology, rendezvous)
        run = assemble(config, topology, places, host, signals, started, watchdog)
        meter = run.interval.meter = EnergyMeter(reads=launch.local_rank == 0)
        if meter.source:
            run.reporter.say(f" energy: read from {meter.source}")
        if watchdog is not None:
            watchdog.before_leaving = partial(requeue_lost, run)
        try:
            stop = train(run)
        finally:
            run.close()
    except BaseException as error:
        if is_lost_peer(error):
            explained = rendezvous.explain(error)
            put_back = config.training.requeue and rendezvous.speaks
            if put_back and run is not None and isinstance(explained, LostRankError):
                print(explained, file=sys.stderr, flush=True)  # before Slurm ends this process
                requeue_lost(run)
            raise explained from error
        rendezvous.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        if claim is not None:
            claim.release()
        rendezvous.close()
    if config.training.requeue and stop is not None and stop.requeue and launch.rank == 0:
        requeue(os.environ, run.reporter.say)  # last, because Slurm ends all processes at once


def requeue_lost(run: Run) -> None:
    """Requeue the job after another rank is lost, if --requeue is given.

    One rank calls this. A job that has not saved anything is not requeued: it would be requeued
    forever.
    """
    if not run.config.training.requeue:
        return
    say = partial(print, file=sys.stderr, flush=True)
    if run.saves is None or run.saves.elapsed_s is None:
        say(
            " note: the job is not put back into the queue: it has not saved a checkpoint since it "
            "began"
        )
        return
    requeue(os.environ, say)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` is how a rank sees the failure of another one.

    That is a broken connection or the timeout of a collective.
    """
    if isinstance(error, LaunchError | dist.DistError):
        return True
    text = str(error)
    signs = (
        "gloo",
        "NCCL",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out",
    )
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, MegatronError)
        and any(s in text for s in signs)
    )


def set_up_host(config: Config, device: torch.device, launch: Launch) -> list[str]:
    """Set this process's threads, determinism and, on a CPU, malloc; return lines for the log."""
    lines = []
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # costs time, changes no result
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    if device.type == "cpu":
        tuned = config.training.allocator_tuning
        lines.append(tune_allocator() if tuned else "malloc: left as it is (--no-allocator-tuning)")
    return [share_cores(device, launch.local_world_size), *lines]


def connect_groups(
    config: Config, rendezvous: Rendezvous, timeout: timedelta, rank_order: str
) -> Topology:
    """Create the groups of the layout and use each once. Raises LaunchError."""
    topology = Topology.create(
        sizes=Sizes.of(config, rank_order, rendezvous.ranks_per_node),
        device=rendezvous.device,
        timeout=timeout,
        tied_embeddings=not config.model.untie_embeddings_and_output_weights,
        flight=rendezvous.flight,
    )
    with topology.flight.phase("groups"):
        # Before torch gives up, whose message says less, or RCCL, which does not give up.
        rendezvous.unless_failed(
            partial(use_groups, topology, config.parallel.num_chunks > 1),
            _FIRST_SHARE * timeout.total_seconds(),
            "the first use of all groups did not end",
        )
    return topology


def assemble(
    config: Config,
    topology: Topology,
    places: Sequence[str] = (),
    host: Sequence[str] = (),
    signals: Signals | None = None,
    started: float | None = None,
    watchdog: Watchdog | None = None,
) -> Run:
    """Build this rank's parts of the run that `config` describes.

    Rank 0 prints layout, `host` (lines about ranks and processes), arguments, kernels and sizes.
    Raises MegatronError.
    """
    torch.manual_seed(config.training.seed)
    signals, reporter = signals or Signals(enabled=False), Reporter(config, topology.rank)
    check_save_folder(config, topology, reporter)
    checkpoint = checkpoint_to_load(config, topology, reporter)
    stored = None if checkpoint is None else stored_settings(checkpoint, config)
    settings = with_checkpoint_settings(config, stored, reporter)
    config, tokenizer = with_tokenizer(settings)
    if config.checkpoint.save_hf is not None:
        from megatron.checkpoint.together import decided_by_first

        if note := decided_by_first(topology, partial(check_export, config)):
            reporter.say(f" note: --save-hf: {note}")
    agree_on_times(topology)
    describe_setup(config, topology, places, reporter, host)
    check_kernels(config, topology)
    batches = BatchSchedule.from_config(config)
    samples = planned_samples(config, batches)
    tasks = read_tasks(config.training.eval_tasks or (), tokenizer, context_of(config))
    build_data = data_builder(config, topology, tokenizer, samples[0], reporter)
    with reporter.console.doing("index of the data"):
        datasets = build_data(*samples)
    describe_data(config, datasets, reporter)
    if config.data.dataloader_type == "cyclic":
        samples = (sys.maxsize,) * 3  # any of the data
    eod = tokenizer.eod if tokenizer is not None else None
    check_loss_masks(config, topology, datasets, samples, eod, reporter)
    chunks, engine = build_model(config, topology, reporter)
    with topology.flight.phase("loading"), reporter.console.doing("loading the checkpoint"):
        progress = load_checkpoint(config, topology, engine, checkpoint, reporter)
    # for --config: the tokenizer gives the vocabulary size again
    record_settings(settings, topology, reporter, progress.iteration)
    end = total_iterations(config, batches, progress.iteration, progress.consumed_samples)
    datasets = extended(config, batches, datasets, build_data, samples, progress, end)
    left = max(0, end - progress.iteration)
    train_samples = max(samples[0], batches.samples_after(left, progress.consumed_samples))
    if stored is not None and not config.checkpoint.finetune:
        train = None if config.training.skip_train else datasets.train
        to_come = (train, train_samples, progress, end, topology.device, reporter)
        describe = partial(describe_resume, stored, config, *to_come)
        first_alone(topology, "comparison with the checkpoint", describe)
    digests = {"samples": sample_digests(datasets)} if topology.world.size > 1 else None
    if digests is not None and (problem := compare(digests, topology.world)):
        raise DataError(problem)
    costs = publish_start(config, topology, places, progress, reporter)
    if isinstance(tokenizer, LimitedTokenizer):
        tokenizer.rest()  # of the steps, only evaluations use it
    describe_length(config, batches, datasets, progress, end, reporter)
    agreement = Agreement(topology)
    saves = build_saves(config, engine, agreement, reporter, places, train_samples)
    if saves is not None:
        signals.saving = lambda: saves.under_way
        if checkpoint and config.checkpoint.load == config.checkpoint.save:
            saves.saved_iteration = progress.iteration
    wall_time = build_wall_time(config, topology, reporter, saves, started, batches, datasets)
    position = progress.consumed_samples
    stream = open_stream(config, topology, datasets.train, position, eod, progress.left_out)
    run = Run(
        config=config,
        topology=topology,
        tokenizer=tokenizer,
        chunks=chunks,
        engine=engine,
        executor=build_executor(config, topology, chunks, engine),
        schedules=Schedules.from_config(config),
        batches=batches,
        progress=progress,
        total_iterations=end,
        datasets=datasets,
        interval=Interval(topology, rates(config, topology)),
        reporter=reporter,
        agreement=agreement,
        stop=StopRules(config, agreement, signals, wall_time),
        saves=saves,
        wall_time=wall_time,
        watchdog=watchdog,
        timers=Timers(topology, config.logging, end),
        loop=LoopState(stream),
    )
    run.callbacks.extend(build_callbacks(run, places, tasks, costs))
    if saves is not None:
        saves.after_save.append(run.saved)
    if topology.device.type == "cuda":
        # Set-up and loading have freed blocks of sizes that no step allocates.
        torch.cuda.empty_cache()
    return run


def with_tokenizer(config: Config) -> tuple[Config, Tokenizer | None]:
    """Return the tokenizer, and `config` with the size of its vocabulary. Raises ConfigError."""
    tokenizer, known = load_tokenizer(config), config.model.vocab_size
    if tokenizer is None:
        return config, None
    size = max(tokenizer.vocab_size, known or 0)
    source, files = hugging_face_folder(config.checkpoint.load), config.tokenizer.tokenizer_model
    if files is not None and source is not None and known is not None and size > known:
        raise ConfigError(
            f"the tokenizer {files} has {size} ids, and the model in {source} has rows for {known}: "
            "add rows to the model (resize_token_embeddings() of transformers), or remove the "
            "tokens that were added to the tokenizer"
        )
    return config.replace(vocab_size=size), tokenizer


def data_builder(
    config: Config,
    topology: Topology,
    tokenizer: Tokenizer | None,
    train_samples: int,
    reporter: Reporter,
) -> Callable[[int, int, int], Datasets]:
    """Return what builds the data sets from the nodes' copies of the data, see first_builds."""
    with reporter.console.doing("copying data to the node"):
        staged = staged_locations(config, topology, reporter.say)
    pad_id = (tokenizer.eod if tokenizer is not None else None) or 0
    build = partial(
        build_datasets, config, locations=staged, pad_id=pad_id, verify=topology.rank == 0
    )
    check = partial(report_data, config, tokenizer, train_samples, staged, reporter.say)
    return first_builds(config, topology, build, reporter.say, check=check)


def build_model(
    config: Config, topology: Topology, reporter: Reporter
) -> tuple[torch.nn.ModuleDict, Engine]:
    """Build this rank's stages and their engine. Raises ConfigError if all weights are frozen."""
    # On a CPU, permanent buffers are kept out of the heap that the steps use.
    tuned = topology.device.type == "cpu" and config.training.allocator_tuning
    mapped = mapped_blocks() if tuned else contextlib.nullcontext()
    with mapped, reporter.console.doing("building the model and the engine"):
        late = config.engine.zero_stage == 3
        chunks = build_chunks(config, topology, layer_context(config, topology, late=late))
        engine = Engine(config, topology, chunks)
    chunks.train()
    if frozen := engine.frozen_parameters():
        if frozen == formulas.parameters_of(config):
            raise ConfigError(f"all {frozen:,} parameters of the model are frozen: none trains")
        reporter.say(
            f" > {frozen:,} of {formulas.parameters_of(config):,} parameters are frozen: they are "
            "saved like the others, without optimizer state"
        )
    return chunks, engine


def publish_start(
    config: Config,
    topology: Topology,
    places: Sequence[str],
    progress: Progress,
    reporter: Reporter,
) -> Costs:
    """Report what the run begins with, and what it costs, which is returned."""
    nodes = len({place.partition(":")[0] for place in places}) or 1
    costs = run_costs(config, nodes, progress.iteration, progress.consumed_samples)
    reporter.say(f" the whole run: {costs.size}")
    reporter.publish(
        Start(
            iteration=progress.iteration,
            config=config.to_dict(),
            layout=layout_record(config, topology),
            places=list(places),
            device=device_name(topology.device),
            parameters=costs.parameters,
            versions=versions(),
            costs=dataclasses.asdict(costs),
            differs=differences(config),
        )
    )
    return costs


def build_callbacks(
    run: Run, places: Sequence[str], tasks: Sequence[Task], costs: Costs
) -> Iterator[Callback]:
    """Yield the callbacks of a run, the project's around the user's, in the order of their calls."""
    config, progress, say = run.config, run.progress, run.reporter.say
    train, steps = run.datasets.train, range(progress.iteration, run.total_iterations)
    path = None if config.metrics_path is None else config.metrics_path.with_name("timeline.json")
    profiler = Profiler(config, run.topology.rank, say, steps, run.topology.device.type)
    yield Recorder(profiler, Timeline(run.topology, run.executor, path, say, places))
    if config.model.num_experts is not None:
        yield Routers()
    yield SameCopies()
    if tasks:
        yield Tasks(tasks)
    if config.training.eval_iters:
        yield Losses()
    if train is not None and not config.training.skip_train:
        order = sample_order(config.data.dataloader_type, len(train), progress.left_out)
        ledger = Ledger(train, order, progress.consumed_samples, progress.sources)
        yield DataLedger(ledger, progress.iteration)
    yield TimeLeft(costs)
    yield from config.pieces.callbacks
    yield EmptySteps()
    if config.logging.straggler_report:
        yield SlowRanks(places)


def check_export(config: Config) -> str:
    """Raise MegatronError at the start where --save-hf could not write the model at the end.

    Returns what it will not write; "" if nothing.
    """
    from megatron.checkpoint.huggingface_save import companions_of

    if problem := export_problem(config.model, config.pieces):
        raise ConfigError(f"--save-hf: {problem}")
    folder = Path(config.checkpoint.save_hf or "")
    if os.path.lexists(folder):
        free = next(
            name for n in itertools.count(2) if not os.path.lexists(name := f"{folder}-{n}")
        )
        raise ConfigError(
            f"--save-hf {folder} ({config.origin('save_hf')}) exists; if this run was there before, "
            f"it may be its own earlier model: give --save-hf {free}, or rename or remove {folder}"
        )
    companions = companions_of(config)
    return companions.note


def record_settings(config: Config, topology: Topology, reporter: Reporter, iteration: int) -> None:
    """Write the settings of a run from `iteration` on into its folder, for --config."""
    metrics = config.metrics_path
    # /dev/null has no folder of a run beside it
    if metrics is None or not topology.world.is_first or not metrics.is_file():
        return
    path = metrics.with_name("settings.toml")
    try:
        write_settings(path, render_settings(config), iteration)
    except (OSError, ValueError) as error:
        reporter.say(f" note: {path} is not written: {getattr(error, 'strerror', None) or error}")


def build_watchdog(config: Config, topology: Topology, rendezvous: Rendezvous) -> Watchdog | None:
    """Return the watchdog, not started; None with --hang-timeout 0."""
    if not config.training.hang_timeout:
        return None
    folder = config.metrics_path.parent if config.metrics_path is not None else None
    # The first use of anything may take nearly as long as torch waits; a report that names the late
    # rank is better than torch's timeout.
    first_s = 60 * _FIRST_SHARE * config.parallel.distributed_timeout_minutes
    return Watchdog(rendezvous, topology, config.training.hang_timeout, folder, first_s)


def build_saves(
    config: Config,
    engine: Engine,
    agreement: Agreement,
    reporter: Reporter,
    places: Sequence[str],
    train_samples: int,
) -> Saves | None:
    """Return when and how the run saves; None without --save."""
    if not config.checkpoint.save:
        return None
    from megatron.checkpoint.save import Saver  # imports torch's checkpoints, which takes long

    topology = engine.topology
    saver = Saver(config.checkpoint.save, topology, config, topology.flight.alive)
    if config.checkpoint.async_save:
        note = saver.prepare(engine)
        if note:
            print(f"note: rank {topology.rank}: {note}", file=sys.stderr, flush=True)
    provenance = Provenance(config, topology, places, train_samples)
    return Saves(config, saver, agreement, reporter, engine=engine, provenance=provenance)


def build_wall_time(
    config: Config,
    topology: Topology,
    reporter: Reporter,
    saves: Saves | None,
    started: float | None,
    batches: BatchSchedule,
    datasets: Datasets,
) -> WallTime | None:
    """Return the end of the job by --walltime or, if the run saves, by Slurm, and its duration.

    None without any.

    Rank 0 watches the clock for all ranks.
    """
    training, given = config.training, config.training.walltime
    began = time.monotonic() if started is None else started
    in_slurm = collectives.broadcast_object("SLURM_JOB_ID" in os.environ, topology.world)
    watched = given != "none" and (given is not None or (saves is not None and in_slurm))
    if not watched and training.exit_duration_in_mins is None:
        return None
    slurm_end: SlurmEnd | None = None
    end_s: float | None = None
    if watched and given is not None:
        seconds = duration_s(given)
        assert seconds is not None, "the command line was checked"
        end_s = began + seconds
    elif watched and topology.world.is_first:
        slurm_end = SlurmEnd(os.environ, reporter.say)

    def left_s() -> float | None:
        if slurm_end is not None:
            return slurm_end.left_s()
        return None if end_s is None else end_s - time.monotonic()

    state_bytes = checkpoint_bytes(config) / topology.world.size if saves is not None else 0.0
    # the agreement of several ranks takes one more step
    steps_ahead = 1 if topology.world.size == 1 else 2
    wall_time = WallTime(
        left_s,
        state_bytes,
        evaluation_iterations(config, batches, datasets),
        steps_ahead,
        close=slurm_end.close if slurm_end is not None else lambda: None,
        duration_s=None if (limit := training.exit_duration_in_mins) is None else 60 * limit,
        elapsed_s=lambda: time.monotonic() - began,
    )
    if saves is not None:
        saves.after_save.append(wall_time.after_save)
    reporter.say(
        " wall time: the run saves and ends in time. Until its first save is measured, one is "
        f"assumed to take {wall_time.save_s:.0f} s"
    )
    return wall_time


def evaluation_iterations(config: Config, batches: BatchSchedule, datasets: Datasets) -> int:
    """Return the global batches of an evaluation, over all corpora and with --eval-ema."""
    size, iterations = batches.global_batch_size_at_end, config.training.eval_iters
    corpora = [min(iterations, -(-len(one) // size)) for one in datasets.corpora.values()]
    return (1 + config.training.eval_ema) * (sum(corpora) if corpora else iterations)


def load_tokenizer(config: Config) -> Tokenizer | None:
    """Return the tokenizer that the flags name; None when only a vocabulary size is given."""
    t = config.tokenizer
    if t.tokenizer_type is None:
        if config.model.vocab_size is None:
            raise ConfigError(
                "the vocabulary size is unknown: give --tokenizer-type and its files, or "
                "--vocab-size"
            )
        return None
    return build_tokenizer(**dataclasses.asdict(t), vocab_size=config.model.vocab_size)


def extended(
    config: Config,
    batches: BatchSchedule,
    datasets: Datasets,
    build: Callable[[int, int, int], Datasets],
    planned: tuple[int, int, int],
    progress: Progress,
    end: int,
) -> Datasets:
    """Return `datasets`, or longer ones where a resumed run takes more samples than planned.

    That happens when it is resumed with another batch size.
    """
    needed = batches.samples_after(end - progress.iteration, progress.consumed_samples)
    if config.training.skip_train or needed <= planned[0]:
        return datasets
    return build(needed, planned[1], planned[2])


def rates(config: Config, topology: Topology) -> Rates:
    """Return the FLOPs of one sample by the formulas, and the peak of this rank's device."""
    model, recompute, parallel = config.model, config.recompute, config.parallel
    stages = assign_layers(model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    counts = [recomputed_layers(len(layers), recompute) for layers in stages]
    groups, layers = map(sum, zip(*counts, strict=True))
    again = formulas.recompute_flops_per_token(
        model, recompute.recompute_granularity, layers, groups, modules=recompute.recompute_modules
    )
    flops = formulas.flops_per_token_of(config)
    # of a CPU: unknown
    peak = formulas.peak_tflops(device_name(topology.device), config.precision.dtype_name)
    return Rates(
        world_size=topology.world.size,
        seq_length=model.seq_length,
        model_flops_per_sample=flops * model.seq_length,
        hardware_flops_per_sample=(flops + again) * model.seq_length,
        peak_flops_per_s=None if peak is None else 1e12 * peak,
    )


def describe_setup(
    config: Config,
    topology: Topology,
    places: Sequence[str],
    reporter: Reporter,
    host: Sequence[str],
) -> None:
    """Print what runs, on what and with which settings, and where it writes."""
    model, say = config.model, reporter.console.say_wrapped
    assert model.vocab_size is not None, "the tokenizer was read"
    experts = ""
    if model.num_experts is not None:
        active = formulas.total_parameters(model, active=True)
        experts = (
            f" ({active:,} of them for each token, with {model.moe_router_topk} of "
            f"{model.num_experts} experts in {model.expert_layers} layers)"
        )
    say(
        f"model: {formulas.parameters_of(config):,} parameters{experts}: {model.num_layers} layers, "
        f"hidden size "
        f"{model.hidden_size}, {model.num_attention_heads} heads, sequences of {model.seq_length} "
        f"tokens, vocabulary of {model.vocab_size}, padded to "
        f"{model.padded_vocab_size(topology.tensor.size)}"
    )
    reporter.say(topology.describe(places))
    name = device_name(topology.device)
    per = "; TFLOPs, MFU and HFU are per GCD" if formulas.device_unit(name) == "GCD" else ""
    say(f"device: {name}, {config.precision.dtype_name}{per}")
    pieces = (f"{name} of your own: {where}" for name, where in config.pieces.describe().items())
    kernels = choose.report(config, topology.device)
    if config.kernels.cuda_graph_impl is not None:
        how = "recorded as graphs" if topology.device.type == "cuda" else "rehearsed, no faster"
        after = config.kernels.cuda_graph_warmup_steps
        kernels.append(f"captured passes: {how}, after {after} eager step(s)")
    for line in (*host, *kernels, *pieces, *(f"note: {notice}" for notice in config.notices)):
        say(line)
    say(describe_output(config))
    path = config.metrics_path
    found = "--print-config shows all" if path is None else f"all: {path.parent / 'settings.toml'}"
    say(f"settings that differ from the defaults ({found}):")
    for line in render_differences(config):
        say(f"  {line}")


def describe_output(config: Config) -> str:
    """Return what the run writes, and where."""
    logging = config.logging
    places = (
        ("checkpoints", config.checkpoint.save),
        ("the trained model", config.checkpoint.save_hf),
        ("metrics", config.metrics_path),
        ("TensorBoard's events", logging.tensorboard_dir),
        ("Weights & Biases' run", logging.wandb_project and f"project {logging.wandb_project}"),
        ("MLflow's run", logging.mlflow_tracking_uri or logging.mlflow_experiment_name),
    )
    written = [f"{what} to {where}" for what, where in places if where]
    return f"writes {', '.join(written) or 'nothing, because there is no --save FOLDER'}"


def describe_length(
    config: Config,
    batches: BatchSchedule,
    datasets: Datasets,
    progress: Progress,
    end: int,
    reporter: Reporter,
) -> None:
    """Print what is left to train."""
    training, length = config.training, config.model.seq_length
    if training.skip_train or progress.iteration >= end:
        return
    before = progress.consumed_samples
    samples = batches.samples_after(end - progress.iteration, before) - before
    evaluated = ""
    if datasets.valid is not None and training.eval_iters:
        size = training.eval_iters * batches.global_batch_size_at_end
        evaluated = f"; evaluation on {size:,} samples every {training.eval_interval} iterations"
    reporter.console.say_wrapped(
        f"training: iterations {progress.iteration + 1} to {end}, {samples:,} samples, "
        f"{samples * length:,} tokens{evaluated}",
    )


def report_data(
    config: Config,
    tokenizer: Tokenizer | None,
    samples: int,
    staged: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Print what a check of the data against the tokenizer finds, and the epochs of the run."""
    epochs, notices = check_data(config, tokenizer, samples, staged)
    text, warning = describe_epochs(epochs)
    if text:
        say(f" > the run reads {text}")
    for note in (*notices, *([warning] if warning else ())):
        say(f" note: {note}")


def describe_data(config: Config, datasets: Datasets, reporter: Reporter) -> None:
    """Print the number of samples of each data set, and notes on padding and missing data."""
    found = {name: getattr(datasets, name) for name in SPLIT_NAMES}
    if datasets.corpora:
        del found["valid"]
        found |= {f"valid {name}": corpus for name, corpus in datasets.corpora.items()}
    listed = ", ".join(
        f"{name} {len(dataset) if dataset is not None else 'none'}"
        for name, dataset in found.items()
    )
    reporter.say(f" > samples of {config.model.seq_length} tokens: {listed}")
    if datasets.train is not None and config.data.loss_mask in ("required", "optional"):
        masked = [isinstance(s, FileDataset) and s.masked for s in sources(datasets.train)]
        reporter.say(
            f" > loss masks: {sum(masked)} of {len(masked)} sources of training data have one, "
            "and the loss is on the tokens that it marks"
        )
    if datasets.train is not None and config.data.data_packing == "best-fit":
        padding = {
            s.name: 100 * s.waste for s in sources(datasets.train) if isinstance(s, PackedDataset)
        }
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


_LOOKED_AT = 500


def check_loss_masks(
    config: Config,
    topology: Topology,
    datasets: Datasets,
    samples: Sequence[int],
    eod: int | None,
    reporter: Reporter,
) -> None:
    """Print how many samples have no token in the loss, where masks may leave some without.

    The run reads the first `samples` of its three data sets. If these are many, rank 0 looks at
    some at equal distances. Raises DataError on all ranks where those for training have none.
    """
    length = config.model.seq_length
    sets = {name: getattr(datasets, name) for name in SPLIT_NAMES} | dict(datasets.corpora)
    limits = dict(zip(SPLIT_NAMES, samples, strict=True))
    problem = ""
    try:
        for name, dataset in sets.items() if topology.world.is_first else ():
            if dataset is None or not _masks(config, dataset):
                continue
            among = min(len(dataset), limits.get(name, len(dataset)))
            without, looked = samples_without_loss(config, dataset, among, eod)
            line = f"{without} of {looked} {name} samples have no token in the loss"
            if looked < among:
                line += f" (looked at of {among}, at equal distances)"
            if 0 < without == looked and name == "train":
                problem = (
                    f"{line}: prompts fill all of --seq-length {length}, or the loss mask marks "
                    "nothing. Raise --seq-length, shorten the prompts, or leave out --loss-mask"
                )
            elif without:
                reporter.say(f"WARNING: {line}: they teach nothing")
    except DataError as error:
        problem = str(error)
    if problem := collectives.broadcast_object(problem, topology.world):
        raise DataError(problem)


def _masks(config: Config, dataset: Source | BlendedDataset) -> bool:
    """Return whether samples of a data set may have no token in the loss."""
    return config.data.eod_mask_loss or any(
        source.masked if isinstance(source, FileDataset) else "loss_tokens" in vars(source)
        for source in sources(dataset)
    )


def samples_without_loss(
    config: Config, dataset: TokenDataset, among: int, eod: int | None
) -> tuple[int, int]:
    """Return how many samples have no token in the loss, and how many `among` the first it read."""
    data, count = config.data, min(among, _LOOKED_AT)
    stream = MicroBatchStream(
        dataset,
        1,
        eod=eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        vocab_size=config.model.vocab_size,
    )
    without = 0
    for number in range(count):
        stream.consumed_samples = number * among // count
        (batch,) = stream.take(1)
        without += not batch.loss_mask.any()
    return without, count
