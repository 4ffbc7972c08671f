"""Hostile input through every entry point: random command lines, environments, damaged files.

    make prove ONLY=hostile [PROVE="--minutes 60 --seed 7 --only files"]
    python -m tests.prove.hostile --seed 7 --case files:123      one case again

There are five kinds of cases:

flags    a command line that works, with words of the tool's own parser and of the configuration
         added, changed or lost
environ  a training with random values of variables that launchers set or the program reads
files    a command line that works, one of whose files has structural damage (hostile_files.py)
runs     a training of two steps with random plausible flags, in one process, or in two whose flags
         or variables may differ
nodes    two processes whose folders differ in one file that decides what they train

A case has to end with success or with a message; one of processes with different files, with a
message (unless the files are read in the same way). A traceback, a fatal signal, more than 30 s,
more than 4 GiB, more than 64 processes, or the execution of code from a file, is a failure. A case
is determined by seed, kind and number alone.
"""

import argparse
import faulthandler
import io
import itertools
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template
from unittest import mock

from megatron.config.command_line import flag_table
from tests.helpers.fault_points import strike
from tests.helpers.launching import ROOT, Script
from tests.helpers.processes import fork_context, free_port, rank_environment
from tests.prove import hostile_files

LIMIT_S = 30.0
FILE_BYTES = 1 << 28
PROCESSES = 64
LARGEST = 1 << 22
KINDS = "files files flags nodes files runs files flags files flags files environ".split()
"""Kinds of cases, in the order that is repeated."""
SMALL = f"{hostile_files.SMALL} --distributed-timeout-minutes 0.1"
MODEL = f"{SMALL} --vocab-size 128"
MOCK = f"{MODEL} --mock-data --train-iters 2"
TRAIN = "pretrain_gpt.py"
# Script | its arguments | maker of the files that it reads (hostile_files.py). {f} is the folder of
# the case.
_TARGETS = """
pretrain_gpt.py | $MOCK | nothing
pretrain_gpt.py | $MOCK --save {f}/save --metrics-file {f}/m.jsonl --tensorboard-dir {f}/tb | nothing
pretrain_gpt.py | $MOCK --deepspeed --deepspeed_config {f}/ds.json | deepspeed_json
pretrain_gpt.py | $MOCK --config {f}/run.toml | settings
pretrain_gpt.py | $MOCK --cluster {f}/machine.toml | cluster
pretrain_gpt.py | $MOCK --train-iters 4 --load {f}/run --save {f}/run | run
pretrain_gpt.py | $MOCK --train-iters 4 --load {f}/run --use-checkpoint-args | run
pretrain_gpt.py | $MODEL --train-iters 2 --data-path {f}/a --data-cache-path {f}/cache | data
pretrain_gpt.py | $MOCK --dry-run --world-size 2 --tensor-model-parallel-size 2 | nothing
tools/build_index.py | $MODEL --train-iters 2 --data-path {f}/a --data-cache-path {f}/cache --world-size 1 | data
tools/build_index.py | $MODEL --train-iters 4 --data-path {f}/a --load {f}/run --world-size 1 | trained
tools/build_corpus.py | --stdlib {f}/lib --output {f}/corpus.jsonl | sources
tools/calibrate.py | --refine {f}/run/metrics.jsonl --cluster {f}/machine.toml -o {f}/out.toml | measured
$FAMILIES
pretrain_gpt.py | --load hf:{f}/hf --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 4 \
--lr 1e-3 --train-iters 2 --eval-iters 0 --num-workers 0 | hf llama3
tools/generate_text.py | --load hf:{f}/hf --prompt ABC --tokens 2 | hf qwen3
tools/convert_checkpoint.py | {f}/megatron {f}/new | torch_dist
tools/convert_checkpoint.py | {f}/megatron {f}/new --no-optim | torch_dist
tools/convert_checkpoint.py | {f}/megatron {f}/new --no-optim | megatron
tools/convert_checkpoint.py | {f}/megatron {f}/new | megatron
tools/convert_checkpoint.py | {f}/deepspeed {f}/new --num-attention-heads 4 --vocab-size 50 | deepspeed
tools/evaluate.py | --load {f}/run --data-path {f}/a --stride 3 | trained
tools/generate_text.py | --load {f}/run --prompt 5 --tokens 2 | spoken
tools/inspect_checkpoint.py | {f}/run --norms --provenance | run
tools/inspect_checkpoint.py | {f}/run --verify --json | run
tools/inspect_checkpoint.py | --diff {f}/run/iter_0000001 {f}/run/iter_0000002 | run
tools/inspect_checkpoint.py | {f}/run --verify | legacy
tools/inspect_dataset.py | {f}/a {f}/b --validate --samples 2 | data
tools/inspect_dataset.py | --run {f}/run --step 1 2 | trained
tools/merge_datasets.py | --inputs {f}/a {f}/b --output-prefix {f}/out | data
tools/plan.py | --model tiny --cluster {f}/machine.toml --devices 2 --global-batch 8 --processes 1 | cluster
tools/preflight.py | check --cluster {f}/machine.toml {f}/job.sh -- srun -N 2 -n 16 python pretrain_gpt.py --preset \
tiny --mock-data --train-iters 10 --global-batch-size 32 --deepspeed_config {f}/ds.json | job
tools/preprocess_data.py | --input {f}/a.jsonl {f}/b.jsonl.gz {f}/c.jsonl.zst {f}/d.parquet $INTO $NULL | texts
tools/preprocess_data.py | $GPT2 --output-prefix {f}/o | gpt2
pretrain_gpt.py | $SMALL --train-iters 2 --data-path {f}/a_text_document $VOCABULARY | recorded
tools/inspect_dataset.py | {f}/a_text_document {f}/b_text_document --validate --samples 2 $VOCABULARY | recorded
tools/merge_datasets.py | --inputs {f}/a_text_document {f}/b_text_document --output-prefix {f}/out | recorded
tools/preprocess_data.py | --input {f}/e.txt $INTO $HF | hugging_face
tools/preprocess_data.py | --chat --input {f}/chat.jsonl $INTO $HF | conversations
tools/preprocess_data.py | --chat --input {f}/chat.jsonl $INTO $HF | conversations
tools/preprocess_data.py | --chat --input {f}/chat.jsonl $INTO $HF | named_templates
tools/preprocess_data.py | --input {f}/e.txt $INTO $TIKTOKEN {f}/x.tiktoken --tiktoken-pattern gpt2 | ranks
tools/preprocess_data.py | --input {f}/e.txt $INTO $TIKTOKEN {f}/x.json --vocab-size 300 \
--tiktoken-num-special-tokens 10 | ranks
tools/preprocess_data.py | --input {f}/e.txt $INTO --tokenizer-type GPTSentencePieceTokenizer $PIECES | pieces
tools/preprocess_data.py | --input {f}/e.txt $INTO --tokenizer-type SentencePieceTokenizer $PIECES | pieces
tools/preprocess_data.py | --input {f}/e.txt $INTO --tokenizer-type Llama2Tokenizer $PIECES | pieces
tools/report.py | {f}/run --format json --picture {f}/loss.png | measured
tools/report.py | {f}/run {f}/run --format md --output {f}/report.md | measured
tools/run_experiment.py | tp --model tiny --values 1,2 --launcher local --cluster {f}/machine.toml --dry-run \
--out {f}/points | points
tools/show_placement.py | --cluster {f}/machine.toml --preset tiny --world-size 2 | cluster
tools/show_schedule.py | --schedule interleaved --chunks 2 | nothing
tools/show_schedule.py | --timeline {f}/timeline.json --plot {f}/t.png | timeline
tools/train_tokenizer.py | --input {f}/e.txt --output {f}/x.model --vocab-size 300 | texts
tools/tune.py | --space {f}/space.toml --cluster {f}/machine.toml --processes 2 --dry-run | space
tools/tune.py | --space {f}/space.toml --no-prior --search optuna --processes 2 --out {f}/tune --report-only | searched
"""
_CONVERTED = "tools/convert_checkpoint.py | {f}/hf {f}/new | hf "
_WORDS = {
    "SMALL": SMALL,
    "MODEL": MODEL,
    "MOCK": MOCK,
    "GPT2": hostile_files.GPT2,
    "VOCABULARY": hostile_files.VOCABULARY,
    "FAMILIES": "\n".join(f"{_CONVERTED}{case}" for case in hostile_files.FAMILIES),
    "INTO": "--workers 1 --output-prefix {f}/o",
    "NULL": "--tokenizer-type NullTokenizer --vocab-size 100",
    "HF": "--tokenizer-type HFTokenizer --tokenizer-model {f}/hf",
    "TIKTOKEN": "--tokenizer-type TikTokenizer --tokenizer-model",
    "PIECES": "--tokenizer-model {f}/spm.model",
}
TARGETS = [
    tuple(line.split(" | ")) for line in Template(_TARGETS.strip()).substitute(_WORDS).splitlines()
]
VARIABLES = """
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME
OMP_NUM_THREADS
TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE SLURM_PROCID
SLURM_NTASKS
SLURM_LOCALID SLURM_NODEID SLURM_STEP_ID SLURM_JOB_ID SLURM_STEP_NUM_TASKS
SLURM_STEP_NUM_NODES
SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_NODELIST
SLURM_STEP_NODELIST
SLURM_JOB_END_TIME SLURM_SUBMIT_HOST SLURM_RESTART_COUNT SLURM_ARRAY_JOB_ID
SLURM_ARRAY_TASK_ID SLURMD_NODENAME
SRUN_CPUS_PER_TASK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK
PMI_RANK PMI_SIZE
PMIX_RANK PBS_NODEFILE MEGATRON_CLUSTER MEGATRON_KERNELS_LIBRARY MEGATRON_REVISION
MEGATRON_KERNELS_MEASURED
HIP_VISIBLE_DEVICES
ROCR_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GLIBC_TUNABLES TOKENIZERS_PARALLELISM
RAYON_NUM_THREADS TMPDIR HOME
USER COLUMNS LOADEDMODULES HOSTNAME
""".split()
LAUNCHERS = (
    {},
    rank_environment(0, 1, 29999),
    dict(
        word.split("=")
        for word in "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_JOB_ID=7 "
        "SLURM_NODEID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_TASKS_PER_NODE=1".split()
    ),
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
)
WORDS = (
    *"0 -1 1 2 3 7.5 ² nan inf -inf 1e308 -1e308 1e-320 1e9 2147483648 9223372036854775808".split(),
    *"18446744073709551616 None true é {} .. . 1,2 0-7 n[1-9999999999] 2(x99999999999)".split(),
    *"tp=4,pp= a=b - -- ' * 127.0.0.1 nope.invalid {f} {f}/nothing/x {f}/fifo {f}/loop".split(),
    *"{f}/zero {f}/folder {f}/empty".split(),
    *("", " ", "9" * 5000, "a" * 5000, "\udcff", "%s %d", "[" * 3000, "\n", "\x1b[31m"),
    *("$(mkdir {f}/RAN)", "; mkdir {f}/RAN", "__import__('os').mkdir('{f}/RAN')"),
)
# Modules and classes in messages between our own processes, which contain nothing from a file.
OWN_PICKLES = tuple(
    """
    _codecs _thread collections concurrent.futures datetime functools megatron multiprocessing numpy
    pathlib builtins.set builtins.frozenset builtins.complex builtins.slice torch
    """.split()
)
PRELOADED = (
    "tests.helpers.preload matplotlib.pyplot matplotlib.backends.backend_agg "
    "pyarrow.parquet rich.table sentencepiece tokenizers tiktoken "
    "megatron.planner.search.output megatron.jobs.tune megatron.jobs.check_job "
    "megatron.planner.dryrun.rehearsal megatron_preparation.preprocess optuna"
).split()


@dataclass(frozen=True)
class Case:
    """Process, or several that communicate.

    script   what each process runs
    words    arguments of each process
    environ  variables of each process
    made     maker of the files that they read
    damage   changes these files and returns how
    trains   whether a training may begin, or ends before its first step
    folders  folder of each process, if their files differ, so that they must not train
    """

    script: str
    words: Sequence[Sequence[str]]
    environ: Sequence[Mapping[str, str]] = ({},)
    made: str = "nothing"
    damage: Callable[[Path], str] | None = None
    trains: bool = True
    folders: Sequence[str] = ()


def case_of(seed, kind, number, targets=TARGETS):
    chance = random.Random(f"{seed} {kind} {number}")
    script, words, made = chance.choice(
        [target for target in targets if kind != "files" or target[2] != "nothing"]
    )
    if kind == "files":
        return Case(
            script,
            [words.split()],
            made=made,
            damage=lambda folder: hostile_files.damage(folder, chance),
        )
    if kind == "flags":
        return Case(script, [changed(script, words.split(), chance)], made=made, trains=False)
    if kind == "nodes":
        return of_nodes(chance)
    if kind == "environ":
        environ = {**chance.choice(LAUNCHERS)}
        environ |= {
            name: chance.choice(WORDS) for name in chance.sample(VARIABLES, chance.randint(1, 3))
        }
        return Case(TRAIN, [MOCK.split()], [environ])
    common = changed(TRAIN, MOCK.split(), chance, sane=True)
    if chance.random() < 0.6:
        return Case(TRAIN, [common])
    split = ("", "", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2")
    pair = f"{MOCK} {chance.choice(split)}".split()
    port = free_port()
    other = changed(TRAIN, pair, chance, sane=True) if chance.random() < 0.5 else pair
    environ = [rank_environment(rank, 2, port) for rank in range(2)]
    if other == pair:
        environ[1][chance.choice(VARIABLES)] = chance.choice(WORDS)
    return Case(TRAIN, [pair, other], environ)


# What two processes read, and the files in their folders of which one differs.
NODES = (
    ("--load hf:hf --mock-data", "hf/*.safetensors"),
    ("--vocab-size 128 --data-path a --data-cache-path cache", "a.*"),
    ("--vocab-size 128 --data-file-list list", "list"),
    ("--load hf:hf --mock-data --eval-tasks tasks.jsonl", "tasks.jsonl"),
    ("--load hf:hf --mock-data", "hf/tokenizer.json"),
)
LAYOUTS = (
    "",
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2 --attention-dropout 0",
    "--zero-stage 3",
)


def of_nodes(chance):
    """Return a case of two processes, in whose folders one file differs in a bit."""
    words, pattern = chance.choice(NODES)
    sizes = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
    rest = "--eval-iters 0 --num-workers 0 --train-iters 4 --distributed-timeout-minutes 0.5"
    sizes = f"{sizes} {rest}" if "hf:" in words else f"{MODEL} --train-iters 4"
    line = [*sizes.split(), *words.split(), *chance.choice(LAYOUTS).split()]

    def damage(folder):
        path = chance.choice(sorted((folder / "1").glob(pattern)))
        content = path.read_bytes()
        at = chance.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        return f"{path.relative_to(folder)}: byte {at}"

    port = free_port()
    environ = [rank_environment(rank, 2, port) for rank in range(2)]
    folders = ("0", "1")
    return Case(TRAIN, [line, line], environ, "nodes", damage, folders=folders)


# -- command lines ---------------------------------------------------------------------------------


@cache
def flags_of(script):
    """Return (spelling, "value" if it takes one, or "") of the flags of a script's own parsers."""
    if script == TRAIN:
        return []
    seen = []

    def note(parser, *_):
        seen.append(parser)
        raise SystemExit(0)

    words = {"tools/preflight.py": ["check"]}.get(script, [])
    quiet = redirect_stderr(io.StringIO())
    with mock.patch("argparse.ArgumentParser.parse_known_args", note), suppress(SystemExit), quiet:
        runpy.run_path(str(ROOT / script), run_name="looked_at")["main"](words)
    actions = [action for parser in seen for action in parser._actions]
    return [
        (name, "" if action.nargs == 0 else "value")
        for action in actions
        for name in action.option_strings
    ]


@cache
def settings():
    """Return the same for the flags of pretrain_gpt.py."""
    return [
        (spelling, "value" if flag.option and flag.value is None else "")
        for spelling, flag in sorted(flag_table().items())
    ]


def changed(script, words, chance, sane=False):
    """Return a command line in which one to three words or flags are added, changed or lost.

    sane  only add flags, mostly with plausible values
    """
    words = list(words)
    script_flags = flags_of(script)
    # Without these flags a tool would start real trials.
    retained = [word for word in words if word in ("--dry-run", "--report-only")]
    passes_on = not script_flags or "--preset" in words or "--num-layers" in words
    for _ in range(chance.randint(1, 3)):
        what = chance.random()
        at = chance.randrange(len(words))
        if what < 0.1 and not sane:
            del words[at:]
        elif what < 0.25 and not sane:
            words[at] = chance.choice(WORDS)
        else:
            flags = (
                settings()
                if passes_on and (not script_flags or chance.random() < 0.5)
                else script_flags
            )
            spelling, takes = chance.choice(flags)
            if sane and spelling in ("--help", "-h", "--print-config", "--dry-run"):
                continue
            words += [
                spelling,
                *([value(spelling, chance, sane)] if takes or chance.random() < 0.05 else []),
            ]
        words = words or [""]
    return [*(word for word in retained if word not in words), *words]


def value(spelling, chance, sane):
    flag = flag_table().get(spelling)
    option = flag.option if flag is not None else None
    if not sane or option is None or chance.random() < 0.2:
        return chance.choice(WORDS)
    if option.choices is not None:
        return str(chance.choice(option.choices))
    plausible = {int: "0 1 2 3 4 8 16 100", float: "0 0.1 0.5 0.9 1 1e-3 2 1000"}
    return chance.choice(plausible.get(option.kind, "{f}/x").split())


# -- one case --------------------------------------------------------------------------------------

# Modules that load their names late, as transformers does, fail if two threads ask at once.
_making = threading.Lock()


@dataclass
class Bench:
    """Folder in which cases run one after another, each with its files in the same place."""

    root: Path
    limit_s: float = LIMIT_S
    _made: dict[str, Path] = field(default_factory=dict)

    @property
    def folder(self):
        return self.root / "case"

    def run(self, case):
        """Run a case; return its verdict, the signature of a failure, and command and output.

        Verdicts are "accepted", "refused" and "FAILED".
        """
        self._lay_out(case.made)
        done = case.damage(self.folder) if case.damage is not None else ""
        note = self.root / "note"
        outcomes = []
        places = case.folders or [""] * len(case.words)
        note.unlink(missing_ok=True)
        with ExitStack() as stack:
            started = [
                stack.enter_context(
                    Script(
                        case.script,
                        [filled(word, self.folder) for word in words],
                        self.root / f"log-{rank}",
                        {"TMPDIR": str(self.folder)}
                        | {k: filled(v, self.folder) for k, v in environ.items()},
                        (arm, str(self.folder), str(note), self.limit_s, case.trains, at),
                    )
                )
                for rank, (words, environ, at) in enumerate(
                    zip(case.words, case.environ, places, strict=True)
                )
            ]
            for script in started:
                script.process.join(self.limit_s + 10)
                outcomes.append((script.process.exitcode, script.output))
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(script.pid, signal.SIGKILL)
        ran = (note.read_text() if note.exists() else "") + (
            "a command ran" if any(self.folder.rglob("RAN")) else ""
        )
        signature = next(
            (description for code, text in outcomes if (description := judge(code, text))), ""
        )
        signature = f"CODE RUN: {ran.splitlines()[0]}" if ran else signature
        if case.folders and not signature and any(code == 0 for code, _ in outcomes):
            signature = f"TRAINED: {done.partition(':')[0]}"
        lines = [
            shlex.join([*(f"{k}={v}" for k, v in e.items()), case.script, *w])
            for w, e in zip(case.words, case.environ, strict=True)
        ]
        transcript = "\n".join(
            [*lines, done, *(f"exit code {code}\n{text[-6000:]}" for code, text in outcomes)]
        )
        verdict = "refused" if any(code for code, _ in outcomes) else "accepted"
        return (
            "FAILED" if signature else verdict,
            signature,
            transcript.replace(str(self.folder), "{f}"),
        )

    def _lay_out(self, made):
        """Put a maker's files into the case's folder, where they are made once and then copied."""
        remove(self.folder)
        if made not in self._made:
            self.folder.mkdir(parents=True)
            with _making:
                hostile_files.MAKERS[made](self.folder)
            self._made[made] = self.root / "made" / made
            remove(self._made[made])
            shutil.copytree(self.folder, self._made[made], symlinks=True)
            remove(self.folder)
        shutil.copytree(self._made[made], self.folder, symlinks=True)
        for name in ("fifo", "loop", "zero", "folder", "empty"):
            hostile_files.special(self.folder / name, name)


def filled(word, folder):
    return word.replace("{f}", str(folder))


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)


def judge(code, text):
    """Return what is wrong with the end of a process and where it happened; "" if nothing is."""
    if code is None or "Timeout (0:" in text:
        frames = re.findall(r'File "([^"]+)", line \d+ in (\w+)', text.partition("Timeout (0:")[2])
        return f"HANG: {location(frames)}"
    if "Traceback (most recent call last)" in text:
        trace = text.rpartition("Traceback (most recent call last)")[2]
        frames = re.findall(r'File "([^"]+)", line \d+, in ([\w<>]+)', trace)[::-1]
        last = next(
            (line for line in trace.splitlines()[1:] if line and not line.startswith((" ", "'"))),
            "?",
        )
        return f"TRACEBACK: {last.partition(':')[0]}: {location(frames)}"
    # A long training without --save is ended by the campaign's own SIGTERM; see arm.
    return f"SIGNAL: {signal.Signals(-code).name}" if code < 0 and code != -signal.SIGTERM else ""


def location(frames):
    """Return the innermost frame of all, and the innermost two of this project."""
    ours = [
        f"{file.removeprefix(f'{ROOT}/')}:{name}"
        for file, name in frames
        if file.startswith(f"{ROOT}/") and "/tests/" not in file
    ]
    innermost = [f"{Path(file).name}:{name}" for file, name in frames[:1]]
    return " < ".join(dict.fromkeys([*innermost, *ours[:2]]))


def arm(folder, note, limit_s, trains, inside=""):
    """Prepare a process before a script: set folder and limits, and record forbidden actions."""
    os.setsid()
    os.chdir(os.path.join(folder, inside))
    faulthandler.dump_traceback_later(limit_s, exit=True)
    resource.setrlimit(resource.RLIMIT_DATA, (hostile_files.MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    started = itertools.count(1)

    def look(event, arguments):
        if event in ("os.fork", "subprocess.Popen", "os.posix_spawn") and next(started) > PROCESSES:
            raise RuntimeError(f"more than {PROCESSES} processes")
        if event == "pickle.find_class" and not ".".join(arguments).startswith(OWN_PICKLES):
            descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{'.'.join(arguments)} was unpickled\n".encode())

    sys.addaudithook(look)
    import megatron.program

    train = megatron.program.pretrain

    def bounded(config, *more):
        if trains and is_small(config):
            strike("megatron.run.step", 3, "terminate")
            train(config, *more)

    megatron.program.pretrain = bounded  # type: ignore[assignment]


def is_small(config):
    """Return whether a step takes a fraction of a second.

    Larger models may be valid and are not run.
    """
    model = config.model
    h = config.model.hidden_size
    wide = max(h, model.ffn_hidden_size or 0) * h
    rows = (model.vocab_size or 0) + (model.max_position_embeddings or 0)
    elements = model.num_layers * 12 * wide + h * rows
    tokens = config.batch.global_batch_size * model.seq_length
    return (
        elements < LARGEST
        and tokens * model.num_layers * max(h, model.seq_length, model.vocab_size or 0) < 1 << 27
    )


# -- the campaign ----------------------------------------------------------------------------------


def cases(only):
    numbers = Counter()
    for kind in itertools.cycle(kind for kind in KINDS if kind in only):
        yield kind, numbers[kind]
        numbers[kind] += 1


def campaign(
    seed,
    listed,
    folder,
    until=float("inf"),
    jobs=1,
    targets=TARGETS,
):
    """Run cases that begin before `until` on the monotonic clock.

    Return ({(kind, verdict): number of cases}, {signature: cases that failed}).
    """
    counts, failures, lock = Counter(), defaultdict(list), threading.Lock()

    def work(job):
        bench = Bench(folder / f"bench-{job}")
        while time.monotonic() < until:
            with lock:
                kind, number = next(listed, ("", 0))
            if not kind:
                return
            verdict, signature, transcript = bench.run(case_of(seed, kind, number, targets))
            with lock:
                counts[kind, verdict] += 1
                if not signature:
                    continue
                failures[signature].append(f"{kind}:{number}")
                if len(failures[signature]) == 1:
                    (folder / f"{kind}-{number}.txt").write_text(transcript, errors="replace")
                    command = f"python -m tests.prove.hostile --seed {seed} --case {kind}:{number}"
                    print(f"{signature}\n    {command}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    return counts, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--seed", type=int, help="of all random choices; default: random, and printed"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(set(KINDS)), default=sorted(set(KINDS)))
    parser.add_argument(
        "--case", metavar="KIND:NUMBER", help="run this case again, and print all its output"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix=f"hostile-{seed}-"))
    fork_context.set_forkserver_preload(list(PRELOADED))
    print(f"seed {seed}, files in {folder}", flush=True)
    if options.case:
        kind, _, number = options.case.partition(":")
        verdict, signature, transcript = Bench(folder / "bench-0").run(
            case_of(seed, kind, int(number))
        )
        print(f"{transcript}\n{verdict} {signature}")
        return int(verdict == "FAILED")
    until = time.monotonic() + 60 * options.minutes
    counts, failures = campaign(seed, cases(options.only), folder, until, options.jobs)
    for bench in folder.glob("bench-*") if failures else [folder]:
        remove(bench)
    for signature, failed in sorted(failures.items()):
        print(f"{len(failed):5} x {signature}: {', '.join(failed[:4])}")
    figures = "".join(f"{kind} {verdict}: {n}, " for (kind, verdict), n in sorted(counts.items()))
    print(f"{figures}{len(failures)} different failures, seed {seed}")
    return int(bool(failures) or not counts)


if __name__ == "__main__":
    sys.exit(main())
