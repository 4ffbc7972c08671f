"""tools/plan.py as called by a user: tables, files, layouts, explanations, exit codes, mistakes."""

import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from megatron import program
from megatron.config.command_line import command_line_of, parse_plan
from megatron.parallel.launch import Launch
from megatron.pipeline import schedule
from megatron.planner.cluster import load_cluster
from megatron.planner.dryrun import rehearsal
from megatron.planner.dryrun.rehearsal import capacity_of
from megatron.planner.layout import CandidateLayout, candidate_of
from megatron.planner.placement import plan_ranks
from megatron.planner.search.find import LayoutSearch, search
from megatron.planner.search.space import LayoutSpace, make_config
from megatron.planner.trace import NeedsTorch
from tests.helpers.fault_points import on
from tests.helpers.launching import Script
from tests.helpers.preflight import checked, problems_of
from tools import plan, tune

FRONTIER = load_cluster("frontier")
ONE = ["--nodes", "1", "--global-batch", "16"]
SMALL = [
    *ONE,
    *"--processes 1 --fix tp=2,4 mbs=1,2 recompute=none,full zero=1 sp=on".split(),
]
MODEL = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size "
    "50257 --bf16"
).split()


MOCK = [*MODEL, "--mock-data"]


def output_to(folder):
    return ["--output", str(folder), "--account", "abc123"]


def call(capsys, *words, flags=MODEL):
    code = plan.main([*words, "--", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.slow
def test_tables_and_files(capsys, tmp_path):
    out = tmp_path / "plan"
    words = [*SMALL, "--tokens", "1e9", "--top", "3", *output_to(out)]
    code, text = call(capsys, *words, flags=MOCK)
    assert code == 0, text
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert len(rows) == 3 and [float(r["seconds_per_step"]) for r in rows] == sorted(
        float(r["seconds_per_step"]) for r in rows
    )
    first = rows[0]
    names = "forward backward recompute layer_messages bubble pipeline_messages data_parallel"
    names += " optimizer host stragglers"
    total = sum(float(first[f"{name}_s"]) for name in names.split())
    assert total == pytest.approx(float(first["seconds_per_step"]))
    tokens_per_s = 16 * 2048 / float(first["seconds_per_step"])
    assert float(first["tokens_per_day"]) == pytest.approx(86400 * tokens_per_s)
    assert float(first["days"]) == pytest.approx(1e9 / tokens_per_s / 86400, rel=1e-4)
    assert float(first["node_hours"]) == pytest.approx(24 * float(first["days"]))
    content = json.loads((out / "table.json").read_text())
    assert all(0 <= loss < 1 for losses in content["losses"].values() for loss in losses.values())
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "trace.json").read_text())


LAYOUT = "tp=2,pp=2,chunks=1,schedule=1f1b,mbs=1,sp=on,zero=1,overlap=off,recompute=full"


def test_a_layout_is_judged_alone(capsys, tmp_path):
    """A single layout is judged as in a run: full recomputation is of every layer, one by one."""
    words = [*SMALL, "--layout", LAYOUT, *output_to(tmp_path)]
    code, text = call(capsys, *words, flags=[*MOCK, "--train-iters", "7"])
    assert code == 0, text
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert (row["tp"], row["pp"], row["dp"], row["recompute"]) == ("2", "2", "2", "full:uniform:1")
    flags = " ".join((tmp_path / "job.sbatch").read_text().split())
    assert "--recompute-granularity=full" in flags and "block" not in flags
    assert "--train-iters" in flags and "--train-tokens" not in flags


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "partition"), [("frontier", "batch"), ("lumi", "standard-g")])
def test_a_written_job_passes_the_preflight_as_it_is(capsys, tmp_path, cluster, partition):
    """Length and learning rate were not given to the planner; GPT-3's of 350M parameters is 3e-4.

    Neither the project nor the site's file is known to the shell in which the job is checked.
    """
    words = [*SMALL, "--cluster", cluster, "--layout", LAYOUT, *output_to(tmp_path)]
    code, text = call(capsys, *words, flags=MOCK)
    assert code == 0, text
    unknown = dict.fromkeys(("SBATCH_ACCOUNT", "SBATCH_PARTITION", "MEGATRON_ROOT"), "")
    job = checked([tmp_path / "job.sbatch"], tmp_path, **unknown, SITE_CLUSTER=cluster)
    # room on this disk, and an environment that is not packed
    assert problems_of(job) <= {("error", "saving"), ("warning", "script")}, job.findings
    assert job.config is not None and job.config.optimizer.lr == 3e-4
    assert job.config.parallel.cluster == job.cluster.name == cluster
    assert (job.value("account"), job.value("partition")) == ("abc123", partition)
    text = (tmp_path / "job.sbatch").read_text()
    assert re.search(r"(?m)^# .*--lr", text) and job.config.batch.train_tokens


def test_what_a_job_needs_is_asked_before_the_search(capsys, tmp_path, monkeypatch):
    """A job needs a project and data, from flags, variables or the site's file."""
    for name in ("SBATCH_ACCOUNT", "SITE_DATA", "SITE_VOCAB"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as searching:
        searching.setattr(LayoutSearch, "rank", lambda *_: pytest.fail("it searched"))
        code, text = call(capsys, *SMALL, "--output", str(tmp_path))
        assert code == 2 and "--account" in text and "--data-path" in text
        code, text = call(capsys, *SMALL, *output_to(tmp_path))
        assert code == 2 and "--account" not in text and "--data-path" in text
    site = {"SBATCH_ACCOUNT": "abc123", "SITE_DATA": "/my data", "SITE_VOCAB": "v.json"}
    for name, value in (site | {"SBATCH_QOS": "debug"}).items():
        monkeypatch.setenv(name, value)
    code, text = call(capsys, *SMALL, "--layout", LAYOUT, "--output", str(tmp_path))
    assert code == 0, text
    script = (tmp_path / "job.sbatch").read_text()
    assert "--data-path '/my data'" in script and "--vocab-file v.json" in script
    assert "#SBATCH -q debug\n" in script


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--layout", LAYOUT, "--layout", "pp=4,chunks=3"], "pp=4,chunks=3: rejected"),
        (["--layout", "pp=3", "--explain"], "pp=3: rejected"),
    ],
)
def test_a_rejected_layout_ends_with_3(capsys, words, named):
    code, text = call(capsys, *SMALL, *words)
    assert code == 3 and named in text


@pytest.mark.parametrize("words", [["--explain"], ["--layout", "tp=4", "--explain", "1"]], ids=len)
def test_the_arithmetic_of_a_layout(capsys, monkeypatch, words):
    """The arithmetic of a layout is explained: sizes, and a layer's first product.

    1024 tokens of width 2048, after a gather over two devices, onto half of three times 2048
    columns.
    """
    monkeypatch.setenv("COLUMNS", "200")  # so that nothing is wrapped
    code, text = call(capsys, *SMALL, "--layout", LAYOUT, *words)
    assert code == 0 and "TP 2 x PP 2 x DP 2" in text and "[2048, 2048] x [2048, 3072]" in text


def test_bounds_and_the_formula_of_the_paper_are_options(capsys):
    """Bounds, and the paper's formula, are options.

    The formula is 24 k B s L h^2 (1 + s / 6 h + V / 16 L h), k = 4; a bound contains the
    prediction.
    """

    def cells(*words):
        code, text = call(capsys, *SMALL, "--markdown", "--layout", LAYOUT, *words)
        assert code == 0, text
        tables = [
            section.splitlines() for section in text.split("\n\n") if section.startswith("| #")
        ]
        split = [
            [[c.strip() for c in row.strip("|").split("|")] for row in (table[0], table[2])]
            for table in tables
        ]
        return {table[0][1]: dict(zip(*table, strict=True)) for table in split}

    plain = cells()
    full = cells("--bounds", "--paper-flops")
    assert len(full) == len(plain) + 1 and {*full["TP"]} - {*plain["TP"]} == {"TFLOP/s (paper)"}
    vocabulary, seconds = 50432, float(full["TP"]["s/step"])  # padded to a multiple of 2 x 128
    terms = 1 + 2048 / (6 * 2048) + vocabulary / (16 * 4 * 2048)
    tflops = 24 * 4 * 16 * 2048 * 4 * 2048**2 * terms / 8 / seconds / 1e12
    assert float(full["TP"]["TFLOP/s (paper)"]) == pytest.approx(tflops, rel=5e-3)
    bounds = full["s/step"]
    assert bounds["s/step"] == full["TP"]["s/step"]
    order = [float(bounds[name]) for name in ("at the peak", "s/step", "slow ends")]
    assert order == sorted(order) and 0 < float(bounds["fast ends"]) < seconds
    assert float(bounds["at the peak"]) == pytest.approx(
        float(full["TP"]["HFU"].strip(" %")) / 100 * seconds, rel=0.01
    )


def test_an_explained_layout_has_what_other_options_ask_for(capsys):
    """Bounds, the paper's FLOP/s and the cost of a length are of the explained layout alone."""
    words = [*SMALL, "--markdown", "--layout", LAYOUT, "--explain"]
    plain, full = (
        {table.partition("\n")[0] for table in text.split("\n\n") if table.startswith("|")}
        for _, text in (
            call(capsys, *words),
            call(capsys, *words, "--bounds", "--paper-flops", "--tokens", "1e9"),
        )
    )
    more = full - plain
    assert plain < full and len(more) == 2
    for column in ("slow ends", "TFLOP/s (paper)", "node-hours"):
        assert any(column in header for header in more)


def test_nothing_fits(capsys):
    for words in ([], ["--explain"]):
        code, text = call(capsys, *SMALL, "--headroom", "99.9%", *words)
        assert code == 3 and "0.1 GiB" in text and "--fix offload=off,on" in text
    without_host = ["--cluster", "mi300a", *SMALL, "--headroom", "99.9%"]
    code, text = call(capsys, *without_host)
    assert code == 3 and "offload" not in text
    _, text = call(capsys, *SMALL, "--headroom", "99.9%", "--fix", "offload=off,on")
    assert "--fix" not in text


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ([*ONE, "--devices", "8"], ["--nodes", "--devices"]),
        ([*ONE, "--headroom", "70"], ["--headroom 70", "64 GiB"]),
        (["--nodes", "1"], ["--global-batch"]),
        ([*SMALL, "--layout", "tp=8"], ["tp=8", "tp=2, 4"]),
        ([*SMALL, "--explain", "99"], ["--explain 99"]),
        ([*SMALL, "--layout", LAYOUT, "--layout", "tp=4", "--output", "x"], ["--output"]),
        ([*SMALL, "--allow", "devices=0-1"], ["devices=0-1", "0 to 7"]),
        ([*SMALL, "--output", "runs", "--account", "a; b"], ["a; b"]),
        ([*SMALL, "--account", "abc123"], ["--account abc123", "--output"]),
        (
            [*SMALL, "--cluster", "mi300x", "--output", "runs", "--account", "abc123"],
            ["--account abc123", "mi300x"],
        ),
    ],
)
def test_mistakes(capsys, words, fragments):
    code, text = call(capsys, *words)
    assert code == 2 and "\nerror: " in f"\n{text}"
    for fragment in fragments:
        assert fragment in text, text


def test_what_is_missing_is_found_before_the_search(capsys, tmp_path, monkeypatch):
    """Matplotlib, for files; the compiled simulator, needed last; and torch are looked for first."""
    monkeypatch.setattr(LayoutSearch, "rank", lambda *_: pytest.fail("it searched"))
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: pytest.fail("it rehearsed"))
    dry = ["--preset", "tiny", "--world-size", "4", "--cluster", "frontier", "--dry-run"]
    space = ["--space", "paper-175b", "--cluster", "frontier", "--launcher", "slurm"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        code, text = call(capsys, *SMALL, *output_to(tmp_path), flags=MOCK)
        assert code == 2 and "matplotlib" in text
    planning = plan.main, [*SMALL, "--", *MODEL]
    tuning = tune.main, [*space, "--nodes", "16", "--dry-run", "--out", str(tmp_path)]
    dry_run = program.run, dry
    with monkeypatch.context() as without:
        without.setattr(schedule, "compiled", None)
        for main, words in (planning, tuning, dry_run):
            assert main(words) == 2
            text = capsys.readouterr().err
            assert "_schedule_clock" in text and "setup.py build_ext" in text
    monkeypatch.setitem(sys.modules, "torch", None)
    for main, words in (planning, dry_run):
        assert main(words) == 2
        assert sys.executable in capsys.readouterr().err


def test_a_layout_is_not_refused_for_lack_of_torch(monkeypatch):
    """The error is not one of the layout: a search does not go on to the next one."""
    monkeypatch.setenv("MEGATRON_TRACE_CACHE", "none")
    monkeypatch.setitem(sys.modules, "torch", None)
    args = plan.build_parser().parse_args(SMALL)
    layout_search = plan.make_search(args, [*MODEL, "--ffn-hidden-size", "4096"])
    with pytest.raises(NeedsTorch, match=re.escape(sys.executable)):
        search(layout_search)


def test_the_plan_allows_what_the_dry_run_allows():
    args = plan.build_parser().parse_args(ONE)
    search = plan.make_search(args, MODEL)
    assert search.capacity == capacity_of(search.space.base, FRONTIER, "gpu") == 57.6 * 2**30


def test_as_many_nodes_are_planned_as_any_queue_allows():
    """Leonardo has 4 devices per node and a qos for 256 nodes, which is not the default."""
    words = "--cluster leonardo --nodes 256 --global-batch 1024".split()
    args = plan.build_parser().parse_args(words)
    assert plan.make_search(args, MODEL).space.worlds == (1024,)


@pytest.mark.slow
def test_a_part_of_a_node_gets_a_command_that_runs(capsys, tmp_path):
    """The command for some devices of a node has the planned layout."""
    words = "--cluster dgx-h100 --processes 1 --fix mbs=1 recompute=none".split()
    for devices in (1, 3):
        batch = ["--devices", str(devices), "--global-batch", str(4 * devices)]
        model = ["--output", str(tmp_path), "--", *MODEL, "--train-iters", "10"]
        assert plan.main([*words, *batch, *model]) == 0, capsys.readouterr().err
        assert subprocess.run(["bash", "-n", str(tmp_path / "command.sh")]).returncode == 0
        launcher, _, flags = (
            (tmp_path / "command.sh").read_text().splitlines()[-1].partition(" pretrain_gpt.py ")
        )
        assert launcher == f"torchrun --nproc-per-node={devices}"
        assert "--train-iters=10" in flags and flags.endswith(' "$@"')
        words_of_flags = shlex.split(flags.removesuffix(' "$@"'))
        config = parse_plan([*words_of_flags, "--world-size", str(devices), *words[:2]])
        planned = json.loads((tmp_path / "table.json").read_text())["best"][0]
        assert candidate_of(config).tp == int(planned["tp"])
        assert candidate_of(config).rank_order == planned["order"]
        assert plan_ranks(config, Launch(world_size=devices)).mapping.device_order == ()


@pytest.mark.parametrize(
    ("launcher", "variables", "start"),
    [
        ("srun", {}, "-N 2 -n 16 --ntasks-per-node=8 -c 14 python"),
        (
            "torchrun",
            {"NODE_RANK": "1", "MASTER_ADDR": "first"},
            "--nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=first --master-port=29500",
        ),
    ],
)
def test_a_command_for_several_nodes_starts_there(capsys, tmp_path, launcher, variables, start):
    """Starts by Slurm, or on each node without; ranks are placed as on the file's machine."""
    machine = tmp_path / "mine.toml"
    machine.write_text('include = ["clusters/dgx-h100"]\nname = "mine"\n')
    words = f"--cluster {machine} --nodes 2 --global-batch 16 --output {tmp_path} --layout {LAYOUT}"
    code, text = call(capsys, *words.split(), flags=MOCK)
    assert code == 0, text
    program = tmp_path / launcher
    program.write_text(f'#!{sys.executable}\nimport sys\nprint("\\0".join(sys.argv[1:]), end="")')
    program.chmod(0o755)
    bash = shutil.which("bash")
    run = [bash, tmp_path / "command.sh", "--seed", "7"]
    environ = {"PATH": str(tmp_path), **variables}
    done = subprocess.run(run, env=environ, capture_output=True, text=True)
    before, _, after = done.stdout.partition("\0pretrain_gpt.py\0")
    assert before.split("\0") == start.split(), done
    config = parse_plan([*after.split("\0"), "--world-size", "16"])
    assert config.parallel.cluster == str(machine)
    assert (config.parallel.pipeline_model_parallel_size, config.training.seed) == (2, 7)
    without = subprocess.run(run, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert without.returncode and "NODE_RANK" in without.stderr


def test_the_flags_give_the_layout():
    """Interleaved chunks and a placement, which the command for a part of a node has not."""
    layout = CandidateLayout(1024, 640, 8, 8, 6, "interleaved", 2, True)
    layout = layout._replace(rank_order="pp-tp-dp", device_order=(0, 1, 6, 7, 2, 3, 4, 5))
    base = make_config("gpt-175b", ["--fp16"], layout.batch)
    space = LayoutSpace(base, "a model", FRONTIER, (layout.world,), {"gbs": (layout.batch,)})
    config = space.config(layout)
    assert parse_plan(command_line_of(config)) == config


def interrupt_its_group(flag):
    """Arm a process: one of its children sends Ctrl-C to the whole group, as a terminal does.

    It does so at its first task.
    """
    os.setsid()

    def act(*_):
        with contextlib.suppress(FileExistsError):
            os.mkdir(flag)
            os.killpg(0, signal.SIGINT)

    on("megatron.planner.task", act)


@pytest.mark.slow
def test_ctrl_c_ends_all_of_it(tmp_path):
    words = [*ONE, "--processes", "2", "--", *MODEL]
    arm = (interrupt_its_group, str(tmp_path / "flag"))
    with Script("tools/plan.py", words, tmp_path / "log", arm=arm) as script:
        code, text = script.wait()
    assert code == 130 and "Traceback" not in text
    assert (tmp_path / "flag").exists()
