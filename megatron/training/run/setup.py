"""Set-up of a run, in order: processes, layout, tokenizer, data, model, engine, checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.find import iteration_of
from megatron.checkpoint.memory_file import MemoryFile
from megatron.checkpoint.settings import checkpoint_bytes
from megatron.checkpoint.shared_errors import decided_by_first
from megatron.config import Config
from megatron.config.duration import duration_s
from megatron.config.help_text import differences
from megatron.config.io import is_same_folder
from megatron.config.settings_file import render_settings, write_settings
from megatron.data.datasets import ContinuedData, Datasets, Reading, build_datasets
from megatron.data.file_lock import FolderClaim
from megatron.data.fill_in_the_middle import FillInTheMiddle
from megatron.data.tokenizer import LimitedTokenizer, Tokenizer, with_tokenizer
from megatron.engine.engine import Engine, build_executor
from megatron.errors import (
    ConfigError,
    DataError,
    DifferingCopiesError,
    LaunchError,
    LostRankError,
    MegatronError,
)
from megatron.model.formulas import ModelSizes
from megatron.model.gpt import build_chunks, check_patterns, layer_context, model_sizes
from megatron.model.stages import stage_owners
from megatron.parallel import collectives
from megatron.parallel.collectives import use_groups
from megatron.parallel.host_processes import bounded
from megatron.parallel.launch import Launch, select_device
from megatron.parallel.layout import DEFAULT_ORDER, LayoutSizes
from megatron.parallel.membership import Membership
from megatron.parallel.process_descriptions import compare
from megatron.parallel.rank_mapping import RankMapping, RankPlan, check_devices
from megatron.parallel.rendezvous import Rendezvous, symptom
from megatron.parallel.store import ANSWER_S
from megatron.parallel.topology import Topology
from megatron.training.report.energy import EnergyMeter
from megatron.training.report.events import Restarted, Start
from megatron.training.report.metrics import Interval, Timers, rates
from megatron.training.report.reporter import Console, Reporter
from megatron.training.run.callbacks import ReportsProgress, SlowRanks, build_callbacks
from megatron.training.run.checkpoints import (
    Saves,
    check_save_folder,
    checkpoint_to_load,
    load_checkpoint,
)
from megatron.training.run.data import first_builds, open_stream, staged_locations
from megatron.training.run.describe import (
    check_loss_masks,
    describe_data,
    describe_length,
    describe_setup,
    report_data,
)
from megatron.training.run.evaluation import evaluation_iterations
from megatron.training.run.host import (
    agree_on_times,
    check_kernels,
    device_name,
    mapped_blocks,
    set_up_host,
)
from megatron.training.run.identity import identity, sample_digests
from megatron.training.run.local_saves import LocalMemory, build_local_saves
from megatron.training.run.loop import train
from megatron.training.run.process import Signals
from megatron.training.run.provenance import Provenance, layout_record, versions
from megatron.training.run.resume import describe_resume, with_checkpoint_settings
from megatron.training.run.resume_data import continued_data, describe_beginning, with_data_order
from megatron.training.run.schedules import (
    BatchSchedule,
    LengthSchedule,
    Progress,
    RunCosts,
    Schedules,
    planned_samples,
    run_costs,
    total_iterations,
)
from megatron.training.run.state import LoopState, Run
from megatron.training.run.stopping import (
    Agreement,
    SlurmEnd,
    Stop,
    StopRules,
    WallTime,
    requeue,
)
from megatron.training.run.stored import (
    Stored,
    stored_in_memory,
    stored_progress,
    stored_settings,
)
from megatron.training.run.tasks import context_of, read_tasks
from megatron.training.safety.watchdog import Watchdog

_DEVICE_S = 10.0  # how long a GPU may take to answer after a fault
_FIRST_SHARE = 0.9  # fraction of --distributed-timeout-minutes that a first use may take


def run_training(
    config: Config,
    launch: Launch,
    signals: Signals,
    started: float,
    renumbered: Callable[[int], object] | None,
    environment: Sequence[str],
    ranks: RankPlan | None,
    membership: Membership | None = None,
) -> bool:
    """Connect, assemble, train, disconnect. See megatron.pretrain.

    `signals` is already entered; `started` is the value of time.monotonic() when the program
    started, for --walltime and --exit-duration-in-mins. `renumbered` is called with the rank that
    the rank mapping gives to this process. `environment` has lines for the log (see
    megatron.parallel.environment.job_environment). `ranks` is the placement of the ranks on a known
    machine; without it only --rank-order and --device-order have an effect. `membership` is this
    process's in a job with restarts; returns False if such a job will restart after a fault.
    """
    if membership is not None:
        torch.cuda.empty_cache()  # blocks of the generation before
    save = config.checkpoint.save
    claim = FolderClaim(Path(save), f"--save {save}") if save else None
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if ranks is None:
        order = config.parallel.rank_order or DEFAULT_ORDER
        ranks = RankPlan(RankMapping(config.parallel.device_order or (), rank_order=order))
    device = select_device(
        launch, config.parallel.distributed_backend, check_devices(ranks.mapping)
    )
    alike = identity(config, ranks.mapping.agreed) if launch.world_size > 1 else None
    rendezvous = Rendezvous(launch, device, timeout, ranks.mapping, alike=alike)
    run: Run | None = None
    stop: Stop | None = None
    restarts = joined = False
    try:
        with Console(launch.rank == 0).doing(f"connecting {launch.world_size} process(es)"):
            rendezvous.join()
        joined = True
        launch = rendezvous.launch
        if renumbered is not None:
            renumbered(launch.rank)
        if membership is not None:
            membership.ranked(launch.rank)
        host = set_up_host(config, rendezvous.device, launch)
        # Only rank 0 prints the locations: thousands of ranks reading the list would overload the
        # store.
        locations = rendezvous.locations if launch.rank == 0 else ()
        if launch.rank == 0:
            host = [
                *ranks.describe(),
                *(f"note: {notice}" for notice in rendezvous.notices),
                *environment,
                *host,
            ]
        topology = connect_groups(config, rendezvous, timeout, ranks.mapping)
        sys.audit("megatron.run.connected")
        memory: MemoryFile | None = None
        local: LocalMemory | None = None
        if membership is not None:
            memory = MemoryFile(membership.memory)
            local = LocalMemory.of(
                config, membership.generation, memory, topology, locations, timeout
            )
            rendezvous.connected()
            membership.abort = partial(rendezvous.abort, topology)
        if claim is not None:
            decided_by_first(topology, partial(claim.take, partial(print, flush=True)))
        watchdog = build_watchdog(config, topology, rendezvous)
        printed = None if membership is None else membership.printed
        run = assemble(
            config, topology, signals, locations, host, started, watchdog, local, printed
        )
        sys.audit("megatron.run.assembled")
        meter = run.interval.meter = EnergyMeter(reads=launch.local_rank == 0)
        if meter.source:
            run.reporter.say(f" energy: read from {meter.source}")
        if watchdog is not None:
            watchdog.before_leaving = partial(requeue_lost, run)
        if membership is not None and memory is not None:
            take_part(run, membership, rendezvous)
            if run.saves is not None:
                continue_minutes(run.saves, memory, membership.started)
        try:
            stop = train(run)
        finally:
            run.close()
    except BaseException as error:
        # In a restart a rank that does not arrive is stuck, and is replaced; with spares always.
        generation = None if membership is None else membership.generation
        restarting = generation is not None and bool(generation.number or generation.spares)
        lost = membership is not None and isinstance(error, LostRankError)
        if not joined and not restarting and not lost:
            raise  # it names the ranks that are missing or differ
        if membership is not None and may_restart(error):
            compared = isinstance(error, DifferingCopiesError)
            restarts = membership.lost(symptom(error), compared=compared)
        if restarts:
            rendezvous.failed = rendezvous.restarts = True
        elif is_lost_peer(error):
            explained = rendezvous.explain(error)
            put_back = config.training.requeue and rendezvous.acts_on_failure
            put_back = put_back and membership is None  # otherwise the supervisor does
            if put_back and run is not None and isinstance(explained, LostRankError):
                print(explained, file=sys.stderr, flush=True)  # before Slurm ends this process
                requeue_lost(run)
            raise explained from error
        else:
            if membership is not None:
                membership.failed(symptom(error))
            rendezvous.fail(f"{type(error).__name__}: {error}")
            raise
    finally:
        signals.saving = lambda: False  # it refers to the run, which must end before the next one
        if claim is not None:
            claim.release()
        rendezvous.close()
    if restarts and membership is not None:
        membership.groups = rendezvous.left
        rendezvous.left = ()
        check_device(device)
        return False
    if config.training.requeue and stop is not None and stop.requeue and launch.rank == 0:
        assert run is not None, "it has stopped"
        requeue(os.environ, run.reporter.say)  # last, because Slurm ends all processes at once
    return True


def take_part(run: Run, membership: Membership, rendezvous: Rendezvous) -> None:
    """Report the run's progress and faults to the supervisor, and a restart to the user."""

    def announce(seen: str, ranks: Sequence[int], replace: bool = False) -> None:
        tasks = list[int]()
        # without the store the job does not restart
        with contextlib.suppress(RuntimeError, LaunchError):
            tasks = bounded(lambda: [rendezvous.tasks[rank] for rank in ranks], ANSWER_S)
        membership.announce(seen, tasks, replace=replace)

    run.callbacks.append(ReportsProgress(membership))
    if run.watchdog is not None:
        run.watchdog.announce = announce
    generation = membership.generation
    factor = run.config.training.replace_slow_ranks
    if generation.spares:
        for callback in run.callbacks:
            if isinstance(callback, SlowRanks):
                callback.announce = partial(announce, replace=True)
    elif factor is not None:
        run.reporter.say(
            f" note: --replace-slow-ranks {factor:g}: there is no spare node, so slow ranks are only "
            "reported"
        )
    if not generation.number:
        return
    outage_s = generation.outage_s + time.monotonic() - membership.began_s
    run.reporter.publish(
        Restarted(
            iteration=run.progress.iteration,
            restart=generation.number,
            cause=generation.cause,
            ranks=generation.launch.world_size,
            outage_s=outage_s,
            ways=dict(generation.restarts),
            reached=generation.reached,
        )
    )
    repeated = max(generation.reached - run.progress.iteration, 0)
    ways = ", ".join(f"{count} {way}" for way, count in generation.restarts.items())
    run.reporter.say(
        f" restart {generation.number} within the job, {outage_s:.1f} s after the fault: "
        f"{generation.cause}. {generation.launch.world_size} ranks continue after iteration "
        f"{run.progress.iteration}, {repeated} step(s) are repeated (so far {ways})"
    )


def continue_minutes(saves: Saves, memory: MemoryFile, started: float) -> None:
    """Let the minutes between saves count on after a restart, by the clock of this node.

    They count from the last save that was completed or, if this process does not know of one, from
    `started`, when the program started. Otherwise a job with frequent faults would never save.
    """
    saves.last_s = memory.saved_s or started
    saves.after_save.append(lambda seconds: memory.saved(saves.last_s))


def check_device(device: torch.device) -> None:
    """Raise LostRankError unless a GPU still computes: after some faults only a new process can."""
    if device.type == "cuda":

        def compute() -> None:
            torch.cuda.synchronize(device)
            torch.ones(1, device=device).sum().item()

        try:
            bounded(compute, _DEVICE_S, "it gave no answer")
        except (RuntimeError, LaunchError) as error:
            raise LostRankError(f"{device} is not usable in this process: {error}") from error


def may_restart(error: BaseException) -> bool:
    """Return whether this process can take part in a restart of the job after `error`."""
    return is_lost_peer(error) or isinstance(error, DifferingCopiesError)


def requeue_lost(run: Run) -> None:
    """Requeue the job after a rank is lost or hangs, if --requeue is given.

    One rank calls this. A job that has not saved anything is not requeued: otherwise a job that
    always fails early would be requeued forever.
    """
    if not run.config.training.requeue:
        return
    say = partial(print, file=sys.stderr, flush=True)
    if run.saves is None or run.saves.elapsed_s is None:
        say(" note: the job is not requeued: it has not saved a checkpoint since it began")
        return
    requeue(os.environ, say)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` is a sign that another rank has failed.

    The signs are a broken connection and a collective that timed out.
    """
    if isinstance(error, LaunchError | dist.DistError):
        return True
    signs = "gloo|NCCL|Connection (closed|reset) by peer|Broken pipe|Timed out"
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, MegatronError)
        and re.search(signs, str(error)) is not None
    )


def connect_groups(
    config: Config, rendezvous: Rendezvous, timeout: timedelta, mapping: RankMapping
) -> Topology:
    """Create the groups of the layout and use each once. Raises LaunchError."""
    sizes = LayoutSizes.of(config, mapping.rank_order, rendezvous.ranks_per_node)
    if mapping.expert_ranks_per_node is not None:
        sizes = dataclasses.replace(sizes, expert_ranks_per_node=mapping.expert_ranks_per_node)
    topology = Topology.create(
        sizes=sizes,
        device=rendezvous.device,
        timeout=timeout,
        tied_embeddings=config.model.embeds_on_last_stage,
        flight=rendezvous.flight,
        owners=stage_owners(config),
    )
    with topology.flight.phase("groups"):
        # Give up before torch, whose message is less specific; RCCL would never give up.
        rendezvous.unless_failed(
            partial(use_groups, topology),
            _FIRST_SHARE * timeout.total_seconds(),
            "the first use of all groups did not end",
        )
    return topology


def assemble(
    config: Config,
    topology: Topology,
    signals: Signals,
    locations: Sequence[str] = (),
    host: Sequence[str] = (),
    started: float | None = None,
    watchdog: Watchdog | None = None,
    local: LocalMemory | None = None,
    printed: set[str] | None = None,
) -> Run:
    """Build this rank's parts of the run that `config` describes. Raises MegatronError.

    Rank 0 prints the layout, the lines `host` about ranks and processes, settings, kernels and
    sizes. `locations` has "node:device" of every rank; it is needed on rank 0 only. `local` is for
    local checkpoints; the run continues from one that is newer than those on disk. `printed` has
    what this process has printed before a restart, which is not repeated.
    """
    torch.manual_seed(config.training.seed)
    reporter = Reporter(config, topology.rank)
    check_save_folder(config, topology, reporter)
    checkpoint = checkpoint_to_load(config, topology, reporter)
    on_disk = (iteration_of(checkpoint) or 0) if checkpoint is not None else 0
    in_memory = local.find(topology, on_disk, reporter) if local is not None else None
    if in_memory is not None:
        stored: Stored | None = stored_in_memory(in_memory, config)
    else:
        stored = None if checkpoint is None else stored_settings(checkpoint, config)
    with reporter.describing(printed):
        settings = with_checkpoint_settings(config, stored, reporter)
        before = stored_progress(stored, config)
        settings = with_data_order(settings, stored, before)
        config, tokenizer = with_tokenizer(settings)
        if config.model.trains_in_part:
            check_patterns(config)
        FillInTheMiddle.of(config, tokenizer)  # a token that is missing is reported now
        describe_export(config, topology, reporter)
        agree_on_times(topology)
        sizes = model_sizes(config)
        describe_setup(config, sizes, topology, locations, reporter, host)
        check_kernels(config, topology)
        batches = BatchSchedule.from_config(config)
        tasks = read_tasks(config.training.eval_tasks or (), tokenizer, context_of(config))
        continued = decided_by_first(topology, partial(continued_data, config, stored, before))
        datasets, samples, build = build_data(
            config, topology, tokenizer, batches, reporter, continued
        )
    # A local checkpoint has all parameters: this job has saved them.
    chunks, engine = build_model(config, sizes, topology, reporter, draws=in_memory is None)
    sys.audit("megatron.run.built")
    with topology.flight.phase("loading"), reporter.console.doing("loading the checkpoint"):
        if local is not None and in_memory is not None:
            local.load(in_memory, engine, topology, config, reporter)
            progress = before
        else:
            progress = load_checkpoint(config, topology, engine, checkpoint, reporter)
    record_settings(settings, topology, reporter, progress.iteration)
    end = total_iterations(config, batches, progress)
    train_samples = max(samples[0], progress.samples_at(batches, end))
    datasets = extended(config, datasets, build, samples, train_samples)
    train = None if config.training.skip_train else datasets.train
    if stored is not None and not config.checkpoint.finetune:
        to_come = (train, datasets.valid, train_samples, progress, end, topology.device, reporter)
        decided_by_first(topology, partial(describe_resume, stored, config, *to_come))
    if stored is not None and train is not None and not before.consumed_samples:
        say = reporter.console.say_wrapped
        decided_by_first(topology, partial(describe_beginning, stored, train, say))
    compare_samples(datasets, topology)
    costs = publish_start(config, sizes, topology, locations, progress, reporter)
    if isinstance(tokenizer, LimitedTokenizer):
        tokenizer.rest()  # training encodes no more text; a user's callback may
    describe_length(config, batches, datasets, progress, end, costs.tokens, reporter)
    agreement = Agreement(topology)
    saves = build_saves(config, engine, agreement, reporter, locations, train_samples, continued)
    signals.saving = lambda: saves is not None and saves.in_progress
    resumes = is_same_folder(config.checkpoint.load, config.checkpoint.save)
    if saves is not None and checkpoint and resumes:
        saves.saved_iteration = progress.iteration if in_memory is None else on_disk
    local_saves = None
    if local is not None:
        assert saves is not None, "a job with restarts saves"
        local_saves = build_local_saves(
            config, engine, agreement, reporter, local, in_memory, saves.provenance
        )
    wall_time = build_wall_time(
        config, sizes, topology, reporter, saves, started, batches, datasets
    )
    position = progress.consumed_samples
    stream = open_stream(
        config,
        topology,
        datasets.train,
        position,
        tokenizer,
        progress.left_out,
        iteration=progress.iteration,
    )
    run = Run(
        config=config,
        topology=topology,
        tokenizer=tokenizer,
        chunks=chunks,
        engine=engine,
        executor=build_executor(config, topology, chunks, engine),
        schedules=Schedules.from_config(config),
        batches=batches,
        lengths=LengthSchedule.from_config(config),
        progress=progress,
        total_iterations=end,
        datasets=datasets,
        interval=Interval(topology, rates(config, topology), config),
        reporter=reporter,
        agreement=agreement,
        stop=StopRules(config, agreement, signals, wall_time),
        saves=saves,
        wall_time=wall_time,
        watchdog=watchdog,
        timers=Timers(topology, config.logging, end),
        loop=LoopState(stream),
        local_saves=local_saves,
    )
    run.callbacks.extend(build_callbacks(run, locations, tasks, costs))
    if saves is not None:
        saves.after_save.append(run.saved)
    torch.cuda.empty_cache()  # set-up and loading have freed blocks of sizes that steps do not use
    return run


def build_data(
    config: Config,
    topology: Topology,
    tokenizer: Tokenizer | None,
    batches: BatchSchedule,
    reporter: Reporter,
    continued: ContinuedData,
) -> tuple[Datasets, tuple[int, int, int], Callable[[int, int, int], Datasets]]:
    """Return the data sets, how many samples of each may be read, and a function to build others.

    `continued` says where they continue in a resumed run. The function takes numbers of samples.
    With --dataloader-type cyclic any sample may be read: the numbers returned are then sys.maxsize.
    """
    samples = planned_samples(config, batches)
    if continued.end is not None:  # with another batch size than before, say
        samples = (continued.end, *samples[1:])
    staged = dict[str, str]()
    staging = torch.tensor(int(config.data.stage_data_to is not None))
    if collectives.all_reduce(staging, topology.world, dist.ReduceOp.MAX):
        with reporter.console.doing("copying data to the node"):
            staged = staged_locations(config, topology, reporter.say)
    pad_id = tokenizer.eod if tokenizer is not None else 0
    reading = Reading(staged, pad_id, verify=topology.rank == 0)
    build = partial(build_datasets, config, reading=reading, continued=continued)
    check = partial(report_data, config, tokenizer, samples[0], staged, reporter.say, continued)
    build_in_turn = first_builds(config, topology, build, reporter.say, check=check)
    with reporter.console.doing("index of the data"):
        datasets = build_in_turn(*samples)
    describe_data(config, datasets, reporter)
    if config.data.dataloader_type == "cyclic":
        samples = (sys.maxsize,) * 3
    check_loss_masks(config, topology, datasets, samples, tokenizer, reporter)
    return datasets, samples, build_in_turn


def build_model(
    config: Config, sizes: ModelSizes, topology: Topology, reporter: Reporter, draws: bool = True
) -> tuple[torch.nn.ModuleDict, Engine]:
    """Build this rank's stages and their engine. Raises ConfigError if all weights are frozen.

    Without `draws` the parameters are zeros instead of initial values.
    """
    # On a CPU, permanent buffers are kept outside the heap that the steps use.
    tuned = topology.device.type == "cpu" and config.training.allocator_tuning
    mapped = mapped_blocks() if tuned else contextlib.nullcontext()
    with mapped, reporter.console.doing("building the model and the engine"):
        late = config.engine.zero_stage == 3
        chunks = build_chunks(config, topology, layer_context(config, topology, draws, late))
        engine = Engine(config, topology, chunks)
    chunks.train()
    if frozen := engine.frozen_parameters():
        total = sizes.parameters()
        if frozen == total:
            raise ConfigError(
                f"all {frozen:,} parameters of the model are frozen: train at least one of them"
            )
        reporter.say(
            f" > {total - frozen:,} of {total:,} parameters are trainable; the {frozen:,} frozen ones "
            "are saved like the others, without optimizer state"
            + ("; without --load they stay random" if config.checkpoint.load is None else "")
        )
    return chunks, engine


def publish_start(
    config: Config,
    sizes: ModelSizes,
    topology: Topology,
    locations: Sequence[str],
    progress: Progress,
    reporter: Reporter,
) -> RunCosts:
    """Report the start of the run and its costs; return the costs."""
    nodes = len({location.partition(":")[0] for location in locations}) or 1
    costs = run_costs(config, sizes, nodes, progress)
    reporter.say(f" the whole run: {costs.size}")
    reporter.publish(
        Start(
            iteration=progress.iteration,
            config=config.to_dict(),
            layout=layout_record(config, topology),
            places=list(locations),
            device=device_name(topology.device),
            parameters=costs.parameters,
            versions=versions(),
            costs=dataclasses.asdict(costs),
            differs=differences(config),
        )
    )
    return costs


def compare_samples(datasets: Datasets, topology: Topology) -> None:
    """Raise DataError on all ranks unless they read the same samples."""
    if topology.world.size > 1:
        digests = {"samples": sample_digests(datasets)}
        if problem := compare(digests, topology.world):
            raise DataError(problem)


def describe_export(config: Config, topology: Topology, reporter: Reporter) -> None:
    """Check --save-hf on rank 0 for all ranks, and print which parts it will not write."""
    if config.checkpoint.save_hf is None:
        return
    from megatron.checkpoint.huggingface_save import check_export

    if note := decided_by_first(topology, partial(check_export, config)):
        reporter.say(f" note: --save-hf: {note}")


def record_settings(config: Config, topology: Topology, reporter: Reporter, iteration: int) -> None:
    """On rank 0, write the settings of the run to settings.toml next to the metrics file.

    The file is for --config; the run starts at `iteration`. `config` is from before
    `with_tokenizer`, because the tokenizer supplies the vocabulary size again.
    """
    metrics = config.metrics_path
    # a file such as /dev/null is not in the folder of a run
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
    # The first use of anything may take nearly as long as torch's timeout; a report that names the
    # late rank is better than that timeout.
    first_s = 60 * _FIRST_SHARE * config.parallel.distributed_timeout_minutes
    return Watchdog(rendezvous, topology, config.training.hang_timeout, folder, first_s)


def build_saves(
    config: Config,
    engine: Engine,
    agreement: Agreement,
    reporter: Reporter,
    locations: Sequence[str],
    train_samples: int,
    continued: ContinuedData,
) -> Saves | None:
    """Return the saves of the run; None without --save."""
    if not config.checkpoint.save:
        return None
    from megatron.checkpoint.save import Saver  # slow to import, because of torch's checkpoints

    topology = engine.topology
    saver = Saver(config.checkpoint.save, topology, config, topology.flight.alive)
    if config.checkpoint.async_save:
        note = saver.prepare(engine)
        if note:
            print(f"note: rank {topology.rank}: {note}", file=sys.stderr, flush=True)
    provenance = Provenance(config, topology, locations, train_samples, continued.unread)
    return Saves(config, saver, agreement, reporter, engine, provenance)


def build_wall_time(
    config: Config,
    sizes: ModelSizes,
    topology: Topology,
    reporter: Reporter,
    saves: Saves | None,
    started: float | None,
    batches: BatchSchedule,
    datasets: Datasets,
) -> WallTime | None:
    """Return the limits on the run's time: the end of the job, and --exit-duration-in-mins.

    The end of the job comes from --walltime or, without this flag and if the run saves, from Slurm.
    Returns None if there is no limit. Rank 0 watches the clock for all ranks.
    """
    training = config.training
    requested = config.training.walltime
    began = time.monotonic() if started is None else started
    in_slurm = collectives.broadcast_object("SLURM_JOB_ID" in os.environ, topology.world)
    watched = requested != "none" and (requested is not None or (saves is not None and in_slurm))
    if not watched and training.exit_duration_in_mins is None:
        return None
    slurm_end: SlurmEnd | None = None
    end_s: float | None = None
    if watched and requested is not None:
        seconds = duration_s(requested)
        assert seconds is not None, "the command line was checked"
        end_s = began + seconds
    elif watched and topology.world.is_first:
        slurm_end = SlurmEnd(os.environ, reporter.say)

    def left_s() -> float | None:
        if slurm_end is not None:
            return slurm_end.left_s()
        return None if end_s is None else end_s - time.monotonic()

    state_bytes = 0.0
    if saves is not None:
        state_bytes = checkpoint_bytes(config, sizes) / topology.world.size
    # several ranks need one more step to agree
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
    ends = "the run ends in time"
    if saves is not None:
        saves.after_save.append(wall_time.after_save)
        ends += (
            ", after a save. Until the first save is measured, a save is assumed to take "
            f"{wall_time.save_s:.0f} s"
        )
    reporter.say(f" wall time: {ends}")
    return wall_time


def extended(
    config: Config,
    datasets: Datasets,
    build: Callable[[int, int, int], Datasets],
    planned: tuple[int, int, int],
    train_samples: int,
) -> Datasets:
    """Return `datasets`, or longer ones if a run takes more training samples than planned.

    This happens when a run is resumed with another batch size.
    """
    if config.training.skip_train or train_samples <= planned[0]:
        return datasets
    return build(train_samples, planned[1], planned[2])
