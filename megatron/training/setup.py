"""Puts a run together in the order in which it reads: processes, layout, tokenizer, data, model, engine, checkpoint."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.size import checkpoint_bytes
from megatron.config import Config, render_config
from megatron.config.duration import duration_s
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.ledger import Ledger, sources
from megatron.data.packing import PackedDataset
from megatron.data.sampler import sample_order
from megatron.data.splits import SPLIT_NAMES
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.engine.assemble import build_executor
from megatron.engine.engine import Engine
from megatron.engine.lr import LearningRateSchedule, WeightDecaySchedule
from megatron.errors import ConfigError, LaunchError, LostRankError, MegatronError
from megatron.kernels import choose
from megatron.model import formulas
from megatron.model.gpt import build_chunks
from megatron.parallel.environment import TRACE_FILE, Variables
from megatron.parallel.group_check import check_groups
from megatron.parallel.launch import Launch, detect_launch
from megatron.parallel.placing import Placing, RankPlan
from megatron.parallel.rendezvous import Rendezvous, connect
from megatron.parallel.topology import DEFAULT_ORDER, Topology
from megatron.training import devices
from megatron.training.agreement import Agreement
from megatron.training.allocator import mapped_blocks, tune_allocator
from megatron.training.identity import identity
from megatron.training.kernels import check_agreement
from megatron.training.loop import train
from megatron.training.metrics import Interval, Rates
from megatron.training.micro_batches import BatchSchedule, planned_samples, total_iterations
from megatron.training.passport import Passport
from megatron.training.profiling import Profiler
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.training.requeue import requeue
from megatron.training.resume import checkpoint_to_load, load_checkpoint, with_checkpoint_settings
from megatron.training.run import Run
from megatron.training.save_claim import SaveClaim
from megatron.training.saving import Saves
from megatron.training.signals import Signals
from megatron.training.skips import SkipRules
from megatron.training.spikes import SpikeRule
from megatron.training.stage_data import first_builds, staged_locations
from megatron.training.stopping import StopRules
from megatron.training.stragglers import Stragglers
from megatron.training.streams import PlaceholderStream, Stream, open_stream
from megatron.training.timers import Timers
from megatron.training.walltime import Clock, FixedEnd, SlurmEnd, Unwatched, WallTime
from megatron.training.watchdog import Watchdog

_FIRST_SHARE = 0.9  # of --distributed-timeout-minutes


def run_training(
    config: Config, launch: Launch | None = None, signals: Signals | None = None, started: float | None = None,
    renumbered: Callable[[int], object] | None = None, environment: Sequence[str] = (), ranks: RankPlan | None = None,
) -> None:
    """Connect, assemble, train, disconnect. See megatron.pretrain.

    `signals` are entered already; `started` is when the program began, by time.monotonic, for --walltime. `environment`
    are lines for the log (see megatron.parallel.environment.job_environment). `ranks` place them on a known machine;
    without it only --rank-order and --device-order change anything.
    """
    launch = launch or detect_launch()
    at_s = time.monotonic() if started is None else started
    start = Start(signals or Signals(enabled=False), at_s, SaveClaim(config.checkpoint.save))
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if ranks is None:
        order = config.parallel.rank_order or DEFAULT_ORDER
        ranks = RankPlan(Placing(config.parallel.device_order or (), rank_order=order))
    alike = identity(config, launch, ranks.placing.agreed) if launch.world_size > 1 else None
    rendezvous = connect(launch, timeout, config.parallel.distributed_backend, ranks.placing, alike)
    launch = rendezvous.launch
    if renumbered is not None:
        renumbered(launch.rank)
    run: Run | None = None
    try:
        host = set_up_host(config, rendezvous.device, launch)
        # Only rank 0 prints them; thousands of ranks asking for the list would cost the store much.
        places = rendezvous.places if launch.rank == 0 else ()
        if launch.rank == 0:
            host = [*ranks.describe(), *(f"note: {notice}" for notice in rendezvous.notices), *environment, *host]
        topology, lines = connect_groups(config, rendezvous, timeout, ranks.placing.rank_order)
        run = assemble(config, topology, places, [*host, *lines], start)
        if launch.rank == 0:
            make_trace_folder(os.environ)
        run.watchdog = build_watchdog(config, run.topology, rendezvous)
        if run.watchdog is not None:
            run.watchdog.before_leaving = partial(requeue_lost, run)
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
        start.claim.release()
        rendezvous.close()
    if config.training.requeue and stop is not None and stop.requeue and launch.rank == 0:
        requeue(os.environ, run.reporter.say)  # last, because Slurm ends all processes at once


def requeue_lost(run: Run) -> None:
    """On one rank, when another is lost: put the job back into the queue, where --requeue is given. A job that has not
    saved anything is not: it would come back for ever."""
    if not run.config.training.requeue:
        return
    say = partial(print, file=sys.stderr, flush=True)
    if run.saves is None or not run.saves.saved_here:
        say(" note: the job is not put back into the queue: it has not saved a checkpoint since it began")
        return
    requeue(os.environ, say)


@dataclass(frozen=True)
class Start:
    """What began before the run was put together: the signals so far, when the program did (time.monotonic), and the
    claim on the --save folder, not taken yet."""

    signals: Signals
    at_s: float
    claim: SaveClaim


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what a rank sees of another one's failure: a broken connection or a collective that timed out."""
    if isinstance(error, LaunchError | dist.DistError):
        return True
    text = str(error)
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")
    return isinstance(error, RuntimeError) and not isinstance(error, MegatronError) and any(s in text for s in signs)


def set_up_host(config: Config, device: torch.device, launch: Launch) -> list[str]:
    """Threads of this process, and on a CPU how it keeps memory; returns lines for the log."""
    lines = []
    if device.type == "cpu":  # first: torch looks once whether it may ask for huge pages, at the first tensor's memory
        tuned = config.training.allocator_tuning
        lines.append(tune_allocator() if tuned else "malloc: left as it is (--no-allocator-tuning)")
    return [devices.share_cores(device, launch.local_world_size), *lines]


def connect_groups(
    config: Config, rendezvous: Rendezvous, timeout: timedelta, rank_order: str
) -> tuple[Topology, list[str]]:
    """The groups of the layout, each of which has worked once, and lines for the log. Raises LaunchError."""
    parallel = config.parallel
    untied = config.model.untie_embeddings_and_output_weights and not config.checkpoint.use_checkpoint_args
    topology = Topology.create(
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, device=rendezvous.device,
        timeout=timeout, tied_embeddings=not untied, flight=rendezvous.flight, order=rank_order,
    )  # fmt: skip
    start = time.monotonic()
    with topology.flight.phase("groups"):
        # Before torch gives up, which knows less, or RCCL, which does not.
        uses = check_groups(topology, rendezvous, _FIRST_SHARE * timeout.total_seconds(), parallel.num_chunks > 1)
    took = f"groups: {uses} collectives and exchanges, the first of each, in {time.monotonic() - start:.2f} s"
    return topology, [took] if uses else []


def assemble(
    config: Config, topology: Topology, places: Sequence[str] = (), host: Sequence[str] = (), start: Start | None = None
) -> Run:
    """This rank's parts of the run that `config` describes.

    Rank 0 prints what the run is: layout, `host` (lines about ranks and processes), arguments, kernels, sizes. Raises
    MegatronError.
    """
    device = topology.device
    torch.manual_seed(config.training.seed)
    reporter = Reporter(config, topology.rank)
    start = start or Start(Signals(enabled=False), time.monotonic(), SaveClaim(None))
    start.claim.take(topology, reporter.say)
    checkpoint = checkpoint_to_load(config, topology, reporter)
    config = with_checkpoint_settings(config, checkpoint, reporter)
    tokenizer = load_tokenizer(config)
    if tokenizer is not None:
        config = config.replace(vocab_size=tokenizer.vocab_size)
    describe_setup(config, topology, places, reporter, host)
    check_agreement(config, topology)

    batches = BatchSchedule.from_config(config)
    samples = planned_samples(config, batches)
    pad_id = tokenizer.eod if tokenizer is not None else 0
    staged = staged_locations(config, topology, reporter.say)
    build = partial(build_datasets, config, locations=staged, pad_id=pad_id, verify=topology.rank == 0)
    build_in_turn = first_builds(config, topology, build, reporter.say)
    datasets = build_in_turn(*samples)
    describe_data(config, datasets, reporter)
    with set_up_memory(config, device):
        chunks = build_chunks(config, topology)
        describe_model(config, chunks, reporter)
        engine = Engine(config, topology, chunks)
    chunks.train()
    with topology.flight.phase("loading"):
        progress = load_checkpoint(config, topology, engine, checkpoint, reporter)
    loaded_here = progress.iteration if checkpoint and config.checkpoint.load == config.checkpoint.save else None
    end = total_iterations(config, batches, progress.iteration, progress.consumed_samples)
    datasets = extended(config, batches, datasets, build_in_turn, samples, progress, end)
    write_start(config, topology, places, reporter, progress)
    agreement = Agreement(topology)
    saves = run_saves(config, topology, engine, reporter, agreement, Passport(config, topology, places), loaded_here)
    wall_time = job_time(config, topology, reporter, start, saves)
    if device.type == "cuda":
        # What set-up and loading have freed is in blocks of sizes that no step asks for.
        torch.cuda.empty_cache()
    run = Run(
        config=config,
        topology=topology,
        tokenizer=tokenizer,
        chunks=chunks,
        engine=engine,
        executor=build_executor(config, topology, chunks, engine),
        learning_rate=LearningRateSchedule(config),
        weight_decay=WeightDecaySchedule(config),
        batches=batches,
        progress=progress,
        total_iterations=end,
        datasets=datasets,
        train_stream=training_stream(config, topology, datasets, progress, tokenizer),
        ledger=training_ledger(config, datasets, progress),
        interval=Interval(topology, rates(config, topology)),
        reporter=reporter,
        agreement=agreement,
        stop=StopRules(config, agreement, start.signals, wall_time),
        skips=SkipRules(config, topology),
        spikes=SpikeRule(config, topology, progress),
        saves=saves,
        wall_time=wall_time,
        timers=Timers(topology, config.logging.timing_log_level),
        stragglers=Stragglers(topology, places) if config.logging.straggler_report else None,
        profiler=Profiler(config, topology.rank),
        accounted_iteration=progress.iteration,
    )
    if saves is not None:
        saves.after_save.append(lambda _: run.call("on_save"))
    return run


def make_trace_folder(environ: Mapping[str, str]) -> None:
    """The folder of torch's flight recorder, which torch does not make, for a job whose environment names one."""
    name = Variables(environ).first(TRACE_FILE)
    if name is not None:
        with contextlib.suppress(OSError):
            Path(environ[name]).parent.mkdir(parents=True, exist_ok=True)


def build_watchdog(config: Config, topology: Topology, rendezvous: Rendezvous) -> Watchdog | None:
    """What ends the job when it hangs; None with --hang-timeout 0."""
    if not config.training.hang_timeout:
        return None
    path = config.metrics_path
    folder = path.parent if path is not None else None
    # What is done for the first time may take as long as torch waits, nearly: to name who is waited for is better.
    first_s = 60 * _FIRST_SHARE * config.parallel.distributed_timeout_minutes
    return Watchdog(rendezvous, topology, config.training.hang_timeout, folder, first_s)


def run_saves(
    config: Config, topology: Topology, engine: Engine, reporter: Reporter, agreement: Agreement, passport: Passport,
    saved_iteration: int | None,
) -> Saves | None:
    """When and how the run saves; None without --save."""
    if not config.checkpoint.save:
        return None
    from megatron.checkpoint.save import Saver  # with torch's checkpoints, which take long to import

    saver = Saver(config.checkpoint.save, topology, config, topology.flight.alive)
    if config.checkpoint.async_save:
        start = time.monotonic()
        note = saver.prepare(engine)
        if note:
            print(f"note: rank {topology.rank}: {note}", file=sys.stderr, flush=True)
        if topology.device.type == "cuda":
            reporter.say(f" --async-save: {saver.snapshot_bytes / 2**30:.2f} GiB of host memory for rank 0's copy, "
                         f"after {time.monotonic() - start:.1f} s")  # fmt: skip
    return Saves(
        config, saver, agreement, reporter, engine=engine, passport=passport, saved_iteration=saved_iteration
    )


def job_time(
    config: Config, topology: Topology, reporter: Reporter, start: Start, saves: Saves | None
) -> WallTime | None:
    """What --walltime or, where there is something to save, Slurm say of the job's end; None where neither does.

    Rank 0 watches the clock for all.
    """
    given = config.training.walltime
    slurm = Agreement(topology)
    slurm.add_first("job", lambda: "SLURM_JOB_ID" in os.environ)
    if given == "none" or (given is None and (saves is None or not slurm.now()["job"])):
        return None
    clock: Clock = Unwatched()
    if given is not None:
        seconds = duration_s(given)
        assert seconds is not None, "the command line was checked"
        clock = FixedEnd(seconds, start.at_s)
    elif topology.world.is_first:
        clock = SlurmEnd(os.environ, reporter.say)
    state_bytes = checkpoint_bytes(config) / topology.world.size if saves is not None else 0.0
    steps_ahead = 1 if topology.world.size == 1 else 2  # the answer of all ranks comes a step late
    wall_time = WallTime(clock, state_bytes, config.training.eval_iters, steps_ahead)
    if saves is not None:
        saves.after_save.append(wall_time.after_save)
    reporter.say(f" wall time: the run saves and ends in time. Until its first save is measured, one is taken to need "
                 f"{wall_time.save_s:.0f} s")  # fmt: skip
    return wall_time


def load_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that the flags name; None when only a vocabulary size is given."""
    t = config.tokenizer
    if t.tokenizer_type is None:
        if config.model.vocab_size is None:
            raise ConfigError("the vocabulary size is not known: give --tokenizer-type and its files, or --vocab-size")
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
    """`datasets`, or longer ones where a run resumed with another batch size takes more samples than planned."""
    needed = batches.samples_after(end - progress.iteration, progress.consumed_samples)
    if config.training.skip_train or needed <= planned[0]:
        return datasets
    return build(needed, planned[1], planned[2])


def training_stream(
    config: Config, topology: Topology, datasets: Datasets, progress: Progress, tokenizer: Tokenizer | None
) -> Stream:
    """The training data after what the run has consumed."""
    if datasets.train is None:
        return PlaceholderStream(config.batch.micro_batch_size, topology.data.rank, topology.data.size)
    eod = tokenizer.eod if tokenizer is not None else None
    return open_stream(config, topology, datasets.train, progress.consumed_samples, eod, progress.left_out)


def training_ledger(config: Config, datasets: Datasets, progress: Progress) -> Ledger | None:
    """The count of what the run takes of each source of training data, continued; None where nothing is trained."""
    if datasets.train is None or config.training.skip_train:
        return None
    order = sample_order(config.data.dataloader_type, len(datasets.train), progress.left_out)
    return Ledger(datasets.train, order, progress.consumed_samples, progress.sources)


def rates(config: Config, topology: Topology) -> Rates:
    """FLOPs of one sample from the formulas, and the peak of this rank's device."""
    model, recompute, parallel = config.model, config.recompute, config.parallel
    layers = recompute.recompute_num_layers * parallel.num_stages if recompute.recompute_method == "block" else None
    again = formulas.recompute_flops_per_token(
        model, recompute.recompute_granularity, layers, modules=recompute.recompute_modules
    )
    flops = formulas.flops_per_token_of(config)
    return Rates(
        world_size=topology.world.size,
        seq_length=model.seq_length,
        model_flops_per_sample=flops * model.seq_length,
        hardware_flops_per_sample=(flops + again) * model.seq_length,
        peak_flops_per_s=devices.peak_flops_per_s(topology.device, config.precision.dtype_name),
    )


def describe_setup(
    config: Config, topology: Topology, places: Sequence[str], reporter: Reporter, host: Sequence[str]
) -> None:
    """Print where the run runs and with what settings."""
    reporter.say(topology.describe(places))
    name = devices.describe(topology.device)
    per = "; TFLOPs, MFU and HFU are per GCD" if formulas.device_unit(name) == "GCD" else ""
    reporter.say(f" device: {name}, {config.precision.dtype_name}{per}")
    for line in host:
        reporter.say(f" {line}")
    reporter.say(render_config(config))
    for name, where in config.pieces.describe().items():
        reporter.say(f" {name} of your own: {where}")
    for notice in config.notices:
        reporter.say(f" note: {notice}")
    for line in choose.report(config, topology.device):
        reporter.say(f" {line}")
    assert config.model.vocab_size is not None, "the tokenizer was read"
    padded = config.model.padded_vocab_size(topology.tensor.size)
    dummies = padded - config.model.vocab_size
    reporter.say(f" > padded vocab (size: {config.model.vocab_size}) with {dummies} dummy tokens (new size: {padded})")


def describe_data(config: Config, datasets: Datasets, reporter: Reporter) -> None:
    """Print how many samples each data set has, and what follows from a missing one."""
    found = ((name, getattr(datasets, name)) for name in SPLIT_NAMES)
    listed = ", ".join(f"{name} {len(dataset) if dataset is not None else 'none'}" for name, dataset in found)
    reporter.say(f" > samples of {config.model.seq_length} tokens: {listed}")
    if datasets.train is not None and config.data.data_packing == "best-fit":
        padding = {s.name: 100 * s.waste for s in sources(datasets.train) if isinstance(s, PackedDataset)}
        if padding:
            most = max(padding, key=lambda name: padding[name])
            share = f"{padding[most]:.3f} % of the tokens" if len(padding) == 1 else (
                f"up to {padding[most]:.3f} % of the tokens of a source (the most in {most})"
            )
            reporter.say(f" > packed by best fit: {share} are padding")
    if datasets.valid is None and config.training.eval_iters:
        reporter.say(" note: no validation data, so no validation loss: see --split and --valid-data-path")


def set_up_memory(config: Config, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Around the set-up of model and optimizer: on a CPU the buffers that stay are kept out of the steps' heap."""
    tuned = device.type == "cpu" and config.training.allocator_tuning
    return mapped_blocks() if tuned else contextlib.nullcontext()


def describe_model(config: Config, chunks: torch.nn.ModuleDict, reporter: Reporter) -> None:
    """Print how many parameters there are in all and on this rank."""
    here = sum(p.numel() for p in chunks.parameters())
    total = formulas.parameters_of(config)
    reporter.say(f" > number of parameters: {total}, of which (with vocabulary padding) on rank 0: {here}")


def write_start(
    config: Config, topology: Topology, places: Sequence[str], reporter: Reporter, progress: Progress
) -> None:
    """The record with which a run, or its resumption, begins in the metrics file."""
    import deepspeed

    layout = topology.layout
    reporter.metrics.write(
        "start",
        iteration=progress.iteration,
        config=config.to_dict(),
        layout={"world": layout.world_size, "tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data},
        rank_order=layout.order,
        places=list(places),
        device=devices.describe(topology.device),
        parameters=formulas.parameters_of(config),
        versions={"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__},
    )  # fmt: skip
