"""All checks of one submission, and what they found."""
from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config import Config, parse_args
from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster, load_cluster
from megatron.planning.memory import RankMemory
from megatron.preflight.check import environment_checks, estimates, file_checks, job_checks, storage_checks
from megatron.preflight.check.estimates import Layout, StartUp
from megatron.preflight.check.file_checks import DataState, Resumption
from megatron.preflight.check.findings import ERROR, NOTE, WARNING, Finding, Place, error, note, warning
from megatron.preflight.check.follow import UNGUARDED, Followed, Job, following
from megatron.preflight.check.slurm_options import Given
from megatron.preflight.check.storage_checks import Storage
from megatron.preflight.check.subject import Subject, Training, sources_of, trainings
from megatron.untrusted import read_bytes

_NUMBERED = re.compile(r"^  \d+\. ", re.MULTILINE)
_JSON_FLAGS = ("--deepspeed_config", "--deepspeed-config")
_MOST_BYTES = 1 << 24  # of a script
_ORDER = (ERROR, WARNING, NOTE)
_PLANNERS = ("run_experiment.py", "tune.py")


@dataclass(frozen=True)
class Submission:
    """What would be submitted: a script and its arguments, or a command (then the text is made of it)."""

    name: str
    text: str
    arguments: tuple[str, ...]
    options: dict[str, Given]
    words: tuple[str, ...]
    is_batch: bool
    problems: tuple[Finding, ...] = ()
    late: tuple[int, ...] = ()


@dataclass
class TrainingReport:
    """What is known of one training command line."""

    training: Training
    config: Config | None = None
    layout: Layout | None = None
    memory: RankMemory | None = None
    storage: Storage | None = None
    start_up: StartUp | None = None
    data: DataState = field(default_factory=DataState)
    resumption: Resumption = field(default_factory=Resumption)


@dataclass
class Report:
    """Everything; `findings` has errors first."""

    submission: Submission
    job: Job
    cluster: Cluster | None = None
    trainings: list[TrainingReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    said: str = ""
    seconds: float = 0.0

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)


def make_report(
    submission: Submission, cluster_name: str | None, limit_s: float, submitted: dict[str, str] | None = None
) -> Report:
    """Follow the script and check everything. Raises ConfigError for a cluster that is not known."""
    submitted = dict(os.environ) if submitted is None else submitted
    guess = cluster_name or submitted.get("MEGATRON_CLUSTER") or submitted.get("SITE_CLUSTER")
    cluster = load_cluster(guess) if guess and guess != "none" else None
    job = _job(submission, submitted, cluster)
    report = Report(submission, job, cluster, findings=list(submission.problems))
    with following(submission.text, submission.name, submission.arguments, job, limit_s) as followed:
        report.said, report.seconds = followed.said, followed.seconds
        sources = sources_of(followed, submission.name, submission.words)
        found = trainings(followed)
        if not found:
            report.findings += _no_training(submission, followed, limit_s)
        if cluster is None and guess is None:
            words = [t.environ.get("MEGATRON_CLUSTER") or _flag(t, "--cluster") for t in found]
            machine = next(filter(None, words), "none")
            if machine != "none":  # only the script names it: again, with its nodes and cards
                return make_report(submission, machine, limit_s, submitted)
        for training in found:
            named = cluster_name or training.environ.get("MEGATRON_CLUSTER") or _flag(training, "--cluster") or guess
            report.cluster = load_cluster(named) if named and named != "none" else None
            subject = Subject(
                job, followed, training, sources, submission.name, submission.is_batch, report.cluster
            )
            with contextlib.chdir(training.event.folder) if os.path.isdir(training.event.folder) else (
                contextlib.nullcontext()
            ):
                one, findings = _check_training(subject, submission)
            report.trainings.append(one)
            report.findings += findings
            if len(found) > 1 and one.config is not None:
                report.findings.append(note("experiments", f"{len(found)} different trainings are "
                    f"started", training.place))
        report.findings = [_clean(finding, followed) for finding in report.findings]
    if report.cluster is None:
        report.findings.append(note("cluster", "no machine is named (--cluster, MEGATRON_CLUSTER): limits, links and "
                                    "memory were not checked"))  # fmt: skip
    unique = list(dict.fromkeys(report.findings))
    report.findings = sorted(unique, key=lambda finding: _ORDER.index(finding.level))
    return report


def _flag(training: Training, name: str) -> str | None:
    words = training.arguments
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and at + 1 < len(words):
            return words[at + 1]
    return None


def _job(submission: Submission, submitted: dict[str, str], cluster: Cluster | None) -> Job:
    if cluster is None:
        return Job(submission.options, submitted)
    return Job(
        submission.options, submitted, cluster.devices_per_node, cluster.name.lower(), cluster.nics,
        cluster.devices_per_node * cluster.cpus_per_task,
    )  # fmt: skip


def _clean(finding: Finding, followed: Followed) -> Finding:
    return Finding(finding.level, finding.about, followed.named(finding.text), finding.place)


def _no_training(submission: Submission, followed: Followed, limit_s: float) -> Iterator[Finding]:
    """Why no training was found: the script's end, and its own last words."""
    place = Place(followed.end[0], followed.end[1])
    last = [line for line in followed.said.splitlines() if line.strip() and not line.startswith("+ ")][-3:]
    said = f" It says: {' / '.join(line.strip() for line in last)}" if last else ""
    if followed.exit_code == UNGUARDED and not followed.events:
        yield error("script", f"this bash cannot follow it (4.4 or newer is needed): {followed.said[-300:]}", place)
        return
    for event in followed.events:
        planner = next((name for word in event.words if (name := Path(word).name) in _PLANNERS), None)
        if planner is not None:
            yield warning(
                "script", f"the trainings are started by tools/{planner}, which is not run here: look at its plan "
                "with --dry-run, and check one of them as a command", Place(event.file, event.line),
            )  # fmt: skip
            return
    if any(event.kind == "endless" for event in followed.events):
        yield error("script", f"does not come to an end, and starts no pretrain_gpt.py before.{said}", place)
    elif followed.exit_code is None:
        yield error("script", f"no end within {limit_s:g} s, and no pretrain_gpt.py before: it was stopped "
            f"here.{said}", place)
    else:
        yield error(
            "script", f"ends with exit code {followed.exit_code} and starts no pretrain_gpt.py on the way.{said}", place
        )
    programs = dict.fromkeys(" ".join(e.words)[:120] for e in followed.events if e.kind == "python")
    if programs:
        listed = "; ".join(list(programs)[:4])
        yield note("script", f"programs are not run, so what they print or decide is not known: {listed}", place)
    kinds = {"missing": "a file that is not there", "unfollowed": "not followed"}
    for event in followed.events:
        if event.kind in kinds:
            text = f"{kinds[event.kind]}: {' '.join(event.words)[:200]}"
            yield warning("script", text, Place(event.file, event.line))


def _check_training(s: Subject, submission: Submission) -> tuple[TrainingReport, list[Finding]]:
    one, found = TrainingReport(s.training), list[Finding]()
    config, problems = read_config(s)
    found += problems
    if config is not None:
        s.config, problems = file_checks.with_vocabulary(s, config)
        one.config = s.config
        found += problems
    found += environment_checks.check_following(s)
    if s.is_batch:
        found += job_checks.check_script(s, list(submission.late), submission.text)
    for check in (
        job_checks.check_nodes, job_checks.check_account, job_checks.check_tasks, job_checks.check_cores,
        job_checks.check_devices, job_checks.check_requeue, environment_checks.check_master,
        environment_checks.check_ranks, environment_checks.check_network, environment_checks.check_modules,
        environment_checks.check_programs, estimates.check_workers,
    ):  # fmt: skip
        found += check(s)
    if s.config is None:
        return one, found
    one.layout, problems = estimates.check_layout(s)
    found += problems
    one.memory, problems = estimates.check_memory(s)
    found += problems
    one.start_up, problems = estimates.start_up(s)
    found += problems
    one.storage = storage_checks.measure_storage(s)
    found += storage_checks.check_saving(s, one.storage)
    found += job_checks.check_signal(s, one.storage.save_s if one.storage else None)
    found += file_checks.check_data(s, one.data)
    found += file_checks.check_checkpoint(s, one.resumption)
    return one, found


def read_config(s: Subject) -> tuple[Config | None, list[Finding]]:
    """The configuration of the training as its ranks would read it, or each of its problems with its place."""
    arguments = _with_real_json(s.training.arguments, s.followed)
    cluster = s.training.environ.get("MEGATRON_CLUSTER", s.cluster.path if s.cluster else "")
    before = os.environ.get("MEGATRON_CLUSTER")
    os.environ["MEGATRON_CLUSTER"] = cluster
    try:
        config = parse_args(arguments, s.training.sizes.tasks)
    except ConfigError as problem:
        texts = _NUMBERED.split(str(problem))[1:] or [str(problem).partition(": ")[2] or str(problem)]
        return None, [
            error("configuration", text.strip(), s.sources.of_flags(text, s.training.place)) for text in texts
        ]
    except SystemExit:
        return None, []
    finally:
        if before is None:
            del os.environ["MEGATRON_CLUSTER"]
        else:
            os.environ["MEGATRON_CLUSTER"] = before
    return config, [note("configuration", text, s.sources.of_flags(text, s.training.place)) for text in config.notices]


def _with_real_json(arguments: Sequence[str], followed: Followed) -> list[str]:
    """The arguments with the file that the script wrote in place of the name of a DeepSpeed JSON."""
    words = list(arguments)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _JSON_FLAGS and equals:
            words[at] = f"{name}={followed.real(value)}"
        elif name in _JSON_FLAGS and at + 1 < len(words):
            words[at + 1] = followed.real(words[at + 1])
    return words


def read_script(path: str) -> str:
    """Raises ConfigError for a script that cannot be read or is not for bash."""
    text = read_bytes(path, _MOST_BYTES, error=ConfigError).decode("utf-8", "surrogateescape")
    if "\0" in text:
        raise ConfigError(f"{path}: line {text.partition(chr(0))[0].count(chr(10)) + 1} has a zero byte: it is no text")
    first = text.split("\n", 1)[0]
    if first.startswith("#!") and not re.search(r"\b(ba|da|z)?sh\b", first):
        raise ConfigError(f"{path} begins with {first}: only scripts for bash and sh can be followed")
    return text


def failed(report: Report, strict: bool) -> bool:
    """Whether something stands against the submission."""
    return report.count(ERROR) > 0 or (strict and report.count(WARNING) > 0)


