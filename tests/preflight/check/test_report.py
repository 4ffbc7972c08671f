"""A sound job has nothing against it; each single mistake is found, with the line where it is to be mended."""
from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import ConfigError
from megatron.preflight.check import storage_checks
from megatron.preflight.check.command import command_submission, script_submission
from megatron.preflight.check.findings import Finding
from megatron.preflight.check.report import Report, make_report
from megatron.preflight.check.storage_checks import free_bytes, quota_left
from tests.helpers.launching import ROOT
from tools import build_index

pytestmark = pytest.mark.slow

SOUND = f"""#!/bin/bash
#SBATCH -A abc123
#SBATCH -N 2
#SBATCH -t 02:00:00
#SBATCH -C nvme
#SBATCH --network=disable_rdzv_get
#SBATCH --ntasks-per-node=8
#SBATCH -c 7
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
module load rocm/7.1.1
module load rccl-net-plugin
export MEGATRON_CLUSTER=frontier
source {ROOT}/examples/frontier/env.sh
cat > ds.json <<JSON
{{"train_micro_batch_size_per_gpu": 2,
 "bf16": {{"enabled": true}}}}
JSON
FLAGS=(--preset tiny --mock-data --train-iters 10 --bf16 --deepspeed_config ds.json
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
    --save RUNS/ckpt --load RUNS/ckpt --save-interval-minutes 20 --keep-last 1
    --requeue)
srun -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest \\
    {sys.executable} -u {ROOT}/pretrain_gpt.py "${{FLAGS[@]}}" "$@"
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage_checks, "free_bytes", lambda path: (10**12, "free"))
    for name in [n for n in os.environ if n.startswith(("SBATCH_", "NCCL_", "FI_", "SITE_", "MEGATRON_", "OMP_"))]:
        monkeypatch.delenv(name)


def check(text: str, *words: str, cluster: str | None = "frontier") -> Report:
    """The report on a job of the folder in which the test stands."""
    script = Path("job.sbatch").absolute()
    script.write_text(text.replace("RUNS", str(script.parent)))
    before = set(os.listdir())
    report = make_report(script_submission([*words[:0], str(script), *words]), cluster, 60.0)
    assert set(os.listdir()) == before
    return report


def found(report: Report, level: str | None = None) -> list[Finding]:
    return [f for f in report.findings if level is None or f.level == level]


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_a_sound_job() -> None:
    report = check(SOUND)
    assert [f for f in report.findings if f.level != "note"] == []
    (one,) = report.trainings
    assert one.config is not None and one.layout is not None and one.memory is not None and one.storage is not None
    assert (one.training.sizes.nodes, one.training.sizes.tasks, one.config.parallel.data_parallel_size) == (2, 16, 2)
    assert one.config.origin("micro_batch_size").startswith("preset") or one.config.batch.micro_batch_size == 2
    assert [row.device for row in one.layout.first + one.layout.last] and len(one.layout.first) == 8
    # 4 bytes for the weight and each of Adam's moments; 1,024 are padding that no checkpoint has.
    assert one.storage.checkpoint == 12 * (512 * 64 + 64 * 64 + 2 * 64 + 4 * (12 * 64 * 64 + 13 * 64))
    assert one.storage.at_once == 2 and one.resumption.end == 10
    assert one.start_up is not None and one.start_up.seconds == 244.0


# (what is replaced, by what, level, subject, words of the line where it is to be mended or of the finding)
Mistake = tuple[str, str, str, str, str]
IN_THE_HEAD: list[Mistake] = [
    ("#SBATCH -A abc123\n", "", "warning", "account", "--open-mode"),
    ("-t 02:00:00", "-t 02:00:01", "error", "wall time", "02:00:01"),
    ("-t 02:00:00", "-t 1:99:00", "error", "wall time", "1:99"),
    ("#SBATCH -t 02:00:00\n", "", "warning", "wall time", "--open-mode"),
    ("-A abc123", "-A abc123 --frobnicate", "error", "options", "--frobnicate"),
    ("module load rocm/7.1.1", "true\n#SBATCH -q debug\nmodule load rocm", "warning", "script", "-q debug"),
    ("FLAGS=(", "export ROCR_VISIBLE_DEVICES=0,1,2,3\nFLAGS=(", "warning", "devices", "ROCR_V"),
    ("#SBATCH --signal=USR1@300\n", "", "warning", "signal", "--open-mode"),
    ("USR1@300", "USR1@10", "warning", "signal", "USR1@10"),
    ("USR1@300", "USR2@300", "error", "signal", "USR2"),
    ("USR1@300", "B:USR1@300", "error", "signal", "B:USR1"),
    ("USR1@300", "USR1@7200", "error", "signal", "USR1@7200"),
    ("#SBATCH --requeue", "#SBATCH --no-requeue", "error", "requeue", "--no-requeue"),
    ("#SBATCH --requeue\n", "", "warning", "requeue", "--open-mode"),
    ("FLAGS=(", "export MASTER_ADDR=$SLURM_SUBMIT_HOST\nFLAGS=(", "error", "address", "MASTER"),
    ("FLAGS=(", "export MASTER_ADDR=localhost\nFLAGS=(", "error", "address", "MASTER_ADDR"),
    ("FLAGS=(", "export RANK=0 WORLD_SIZE=16\nFLAGS=(", "error", "ranks", "RANK=0"),
    ("FLAGS=(", "export WORLD_SIZE=8 RANK=\nFLAGS=(", "error", "ranks", "WORLD_SIZE=8"),
    ("FLAGS=(", "export FI_MR_CACHE_MONITOR=memhooks\nFLAGS=(", "error", "network", "memhooks"),
    ("FLAGS=(", "export NCCL_NET=Socket\nFLAGS=(", "warning", "network", "NCCL_NET=Socket"),
    ("module load rocm", "export NCCL_NET_PLUGIN=/x/aws-ofi-rccl/lib/librccl-net.so\nmodule load libfabric/1.22.0 rocm",
     "warning", "network", "libfabric 1.22.0"),
    ("FLAGS=(", "unset NCCL_NET FI_CXI_DEFAULT_CQ_SIZE\nFLAGS=(", "warning", "network", "srun -N"),
    ("#SBATCH --network=disable_rdzv_get\n", "", "warning", "network", "--open-mode"),
    ("module load rocm/7.1.1\nmodule load rccl-net-plugin", "module load rccl-net-plugin rocm/7.1.1", "error",
     "modules", "module load rccl"),
    ("module load rccl-net-plugin\n", "", "warning", "modules", "module load rocm"),
    ("FLAGS=(", "export OMP_NUM_THREADS=56\nFLAGS=(", "warning", "workers", "OMP_NUM_THREADS=56"),
    ("FLAGS=(", "source nothing.sh\nFLAGS=(", "warning", "script", "nothing.sh"),
    ("FLAGS=(", "eval \"$(printf '%s ' '/bin/true \"' '> x\"')\"\nFLAGS=(", "warning", "script", "eval"),
    (f"source {ROOT}/examples/frontier/env.sh", 'source "$(dirname "$0")/env.sh"', "error", "script", "dirname"),
    ("-n 16 --ntasks-per-node=8", "-n 8 --ntasks-per-node=4", "warning", "tasks", "srun -N"),
]  # fmt: skip
IN_A_TRAINING: list[Mistake] = [
    ("srun -N 2 -n 16", "srun -N 2 -n 8", "error", "tasks", "srun -N 2 -n 8"),
    ("srun -N 2 -n 16", "srun -N 4 -n 32", "error", "tasks", "srun -N 4"),
    ("-n 16 --ntasks-per-node=8", "-n 32 --ntasks-per-node=16", "error", "tasks", "srun -N"),
    ("-n 16 --ntasks-per-node=8", "-n 15", "error", "tasks", "srun -N"),
    ("srun -N 2 -n 16 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest", "env", "error", "tasks", "-u /"),
    ("--ntasks-per-node=8 -c 7", "--ntasks-per-node=8 -c 8", "error", "cores", "srun -N"),
    ("--ntasks-per-node=8 -c 7", "--ntasks-per-node=8", "warning", "cores", "srun -N"),
    ("--ntasks-per-node=8 -c 7", "--ntasks-per-node=8 -c 2", "warning", "cores", "srun -N"),
    ("--gpus-per-task=1 --gpu-bind=closest", "", "error", "devices", "srun -N"),
    ("--gpus-per-task=1", "--gpus-per-task=2", "error", "devices", "srun -N"),
    ("--gpus-per-task=1 --gpu-bind=closest", "--gpus-per-node=4", "error", "devices", "srun -N"),
    ("--mock-data", "--mock-data --no-exit-signal-handler", "error", "signal", "--mock"),
    ("--load RUNS/ckpt", "--load RUNS/old", "error", "saving", "/old"),
    ("--save RUNS/ckpt --load RUNS/ckpt --save-interval-minutes 20 --keep-last 1\n    --requeue", "", "warning",
     "saving", "--save"),
    ("--save-interval-minutes 20", "", "warning", "saving", "--save-interval"),
    ("--save RUNS/ckpt --load RUNS/ckpt", "--save /mnt/bb/x --load /mnt/bb/x", "error", "saving", "/mnt/bb/x"),
    ("--mock-data", "--mock-data --num-workers 9", "warning", "workers", "--num-workers 9"),
    (f"{ROOT}/pretrain_gpt.py", "/nothing/pretrain_gpt.py", "error", "programs", "srun -N"),
    (sys.executable, "/nothing/bin/python", "error", "programs", "srun -N"),
    ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 3", "error", "configuration", "multiple"),
    ("--bf16", "--fp16", "error", "configuration", "fp16"),
    ("--train-iters 10", "--trainiters 10", "error", "configuration", "--trainiters"),
    ("--mock-data", "--data-path RUNS/corpus", "error", "data", "--data-path"),
    ("--mock-data", "--mock-data --vocab-file RUNS/v --merge-file RUNS/m", "error", "tokenizer", "--vocab-file"),
    ("--preset tiny", "--preset tiny --device-order 0,1,2,3,4,5,6,6", "error", "configuration", "--device-order"),
    ("--preset tiny", "--preset tiny --hidden-size 65536 --seq-length 2048", "error", "memory", "GiB"),
    ("--keep-last 1", "--keep-last 9999999", "error", "saving", "10000000"),
]  # fmt: skip
# Those that hide others, or the line that these are to be put behind.
ALONE: list[Mistake] = [
    ("-N 2\n", "-N 9999\n", "error", "nodes", "-N 9999"),
    ("-t 02:00:00", "-t 20:00:00 -p nothing", "error", "nodes", "-p nothing"),
    ("#SBATCH --open-mode=append\n", "", "warning", "requeue", "#SBATCH --requeue"),
    ("module load rocm/7.1.1", "exit 3", "error", "script", "exit 3"),
    ("module load rocm/7.1.1", "while :; do :; done", "error", "script", "while"),
]  # fmt: skip
# Changes that are none, of one script each.
HARMLESS = [
    {"-t 02:00:00": "-t 20:00:00 -p extended", "--gpus-per-task=1 --gpu-bind=closest": "--gpus-per-node=8",
     "FLAGS=(": "export MASTER_ADDR=$(hostname -i)\nFLAGS=(", sys.executable: "/mnt/bb/me/bin/python"},
    {"#SBATCH -C nvme\n": ""},
    {"USR1@300": "B:USR1@300", "FLAGS=(": "trap 'kill -USR1 $!' USR1\nFLAGS=("},  # sent on by the batch script
]  # fmt: skip


def together(mistakes: list[Mistake]) -> list[list[Mistake]]:
    """Mistakes that can be in one script: of different lines and subjects."""
    groups: list[list[Mistake]] = []
    for mistake in mistakes:
        for group in groups:
            others = [m[0] for m in group]
            if mistake[3] not in [m[3] for m in group] and not any(mistake[0] in o or o in mistake[0] for o in others):
                group.append(mistake)
                break
        else:
            groups.append([mistake])
    return groups


def assert_found(report: Report, mistake: Mistake, begin: int = 0, end: int = 10**6) -> None:
    """The finding: it has these words, or its place is a line with them, after the line `begin` and up to `end`."""
    _, _, level, about, words = mistake
    lines = Path("job.sbatch").read_text().splitlines()
    told = [f for f in report.findings if (f.level, f.about, Path(f.place.file).name) == (level, about, "job.sbatch")]
    here = [lines[f.place.line - 1] for f in told if begin < f.place.line <= end]
    assert any(words in text for text in (*here, *(f.text for f in told))), (mistake, list(map(str, report.findings)))


@pytest.mark.parametrize("group", together(IN_THE_HEAD) + [[m] for m in ALONE],
                         ids=lambda group: ", ".join(m[3] for m in group))  # fmt: skip
def test_mistakes_in_the_head_are_found(group: list[Mistake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.preflight.check.follow._STEPS", 3000)
    script = SOUND
    for old, new, *_ in group:
        assert old in script
        script = script.replace(old, new, 1)
    report = check(script)
    for mistake in group:
        assert_found(report, mistake)


def test_mistakes_in_a_training_are_found() -> None:
    """A script of many trainings, each with one mistake."""
    script, part, training = SOUND.partition("FLAGS=(")
    ends = [script.count("\n")]
    for number, (old, new, *_) in enumerate(IN_A_TRAINING):
        assert old in part + training
        script += (part + training).replace(old, new, 1).replace('"$@"', f'"$@" --seed {number}')
        ends.append(script.count("\n"))
    report = check(script)
    for mistake, begin, end in zip(IN_A_TRAINING, ends, ends[1:], strict=False):
        assert_found(report, mistake, begin, end)


def test_what_is_no_mistake() -> None:
    for changes in HARMLESS:
        script = SOUND
        for old, new in changes.items():
            assert old in script
            script = script.replace(old, new, 1)
        assert [f for f in check(script).findings if f.level != "note"] == []


def about_network(report: Report) -> list[tuple[str, bool]]:
    """What is said of the network: how grave, and whether it is of NCCL_NET_GDR_LEVEL."""
    return [(f.level, "NCCL_NET_GDR_LEVEL=PHB" in f.text) for f in report.findings if f.about == "network"]


def test_a_variable_that_one_machine_wants_and_another_must_not_have() -> None:
    assert about_network(check(SOUND)) == [("note", True)]
    head = "export FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_RDZV_PROTO=default\nsource"
    text = SOUND.replace("source", head, 1).replace("#SBATCH --network=disable_rdzv_get\n", "")
    assert about_network(check(text, cluster="lumi")) == [("warning", True)]
    text = text.replace("export FI_MR", "export NCCL_NET_GDR_LEVEL= FI_MR")  # as LUMI's site file has it
    assert about_network(check(text, cluster="lumi")) == []
    text = text.replace("=userfaultfd", "=kdreg2")
    assert about_network(check(text, cluster="lumi")) == [("warning", False)]


def test_a_step_on_one_node_asks_for_the_network() -> None:
    text = SOUND.replace("-N 2", "-N 1").replace("-n 16", "-n 8")
    assert about_network(check(text)) == [("warning", False)]
    assert about_network(check(text.replace("srun", "srun --network=single_node_vni"))) == []
    assert about_network(check(text.replace("disable_rdzv_get", "disable_rdzv_get,single_node_vni"))) == []


def test_flags_of_the_command_line_have_their_place_there() -> None:
    errors = found(check(SOUND, "--pipeline-model-parallel-size", "5"), "error")
    assert [str(finding.place) for finding in errors if "--num-layers 4" in finding.text] == ["command line"]


def test_a_broadcast_needs_disks() -> None:
    text = SOUND.replace("#SBATCH -C nvme\n", "").replace("FLAGS=(", "sbcast x /mnt/bb/me/x\nFLAGS=(")
    (finding,) = found(check(text), "error")
    assert (finding.about, finding.place.line) == ("script", line_of(text, "--open-mode")) and "-C nvme" in finding.text


def test_a_json_that_the_script_writes_is_read_and_called_by_its_name() -> None:
    report = check(SOUND.replace('"train_micro_batch_size_per_gpu": 2', '"train_micro_batch_size_per_gpu": 2, '
        '"amp": {"enabled": true}'))
    (finding,) = found(report, "error")
    assert "ds.json:1: amp.enabled" in finding.text and "preflight-" not in finding.text


def test_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in place of lfs, which answers as its manual page shows; not tried on a Lustre."""
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$*" in\nproject*) echo "  4711 P $3" ;;\n'
        '*-p\\ 4711*) printf "/lustre/orion\\n  100*  90  140  -  5  0  0  -\\n" ;;\n*) echo "/lustre/orion 1 0 '
            '0 - 1 0 0 -" ;;\nesac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    free, limit = free_bytes(tmp_path / "not" / "there")
    assert free == 40 * 1024 and "quota -p 4711" in limit


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("/l 10 15 0 - 1 0 0 -", 5 * 1024), ("/l 40* 0 30 - 1 0 0 -", 0), ("/l 10 0 0 - 1 0 0 -", None), ("", None),
    ],
)  # fmt: skip
def test_answers_of_lfs(answer: str, left: int | None) -> None:
    assert quota_left(answer) == left


def test_commands() -> None:
    words = (
        f"srun -N 2 -n 16 -c 7 --gpus-per-task=1 {sys.executable} {ROOT}/pretrain_gpt.py --preset tiny --mock-data "
        "--train-iters 3 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
    )
    report = make_report(command_submission(words.split()), "frontier", 60.0)
    assert found(report, "error") == [] and report.trainings[0].training.sizes.tasks == 16
    assert {f.about for f in found(report, "warning")} == {"network", "modules", "saving"}
    alone = [sys.executable, f"{ROOT}/pretrain_gpt.py", "--preset", "tiny"]
    report = make_report(command_submission(alone), None, 60.0)
    assert {f.about for f in found(report, "error")} == {"configuration"}


def test_what_cannot_be_submitted() -> None:
    Path("x.csh").write_text("#!/usr/bin/env tclsh\n")
    Path("zero.sh").write_bytes(b"#!/bin/bash\n#SBATCH -J a\0b\n")
    for words in (["nothing.sh"], ["-N", "2"], ["x.csh"], ["zero.sh"], ["--wrap", "ls"]):
        with pytest.raises(ConfigError):
            script_submission(words)
    with pytest.raises(ConfigError):
        command_submission([])


def test_the_checkpoint_it_goes_on_from(tmp_path: Path) -> None:
    from megatron.checkpoint.settings import plain
    from tests.checkpoint.made import make, tensors

    config = check(SOUND).trainings[0].config
    assert config is not None
    stored = {"model": plain(config.model), "optimizer": plain(config.optimizer)}
    make(tmp_path / "ckpt", 7, tensors(), config=stored, state={"consumed_samples": 56})
    report = check(SOUND)
    resumption = report.trainings[0].resumption
    assert (resumption.iteration, resumption.end) == (7, 10)
    assert resumption.folder == str(tmp_path / "ckpt" / "iter_0000007")
    (finding,) = found(check(SOUND.replace("--preset tiny", "--preset tiny --num-layers 8")), "error")
    assert finding.about == "checkpoint" and "--num-layers" in finding.text
    assert finding.place.line == line_of(SOUND, "--load")
    (finding,) = found(check(SOUND.replace("--train-iters 10", "--train-iters 7")), "warning")
    assert finding.about == "checkpoint"
    (tmp_path / "ckpt" / "iter_0000007" / "state.json").write_text("{}")
    assert found(check(SOUND), "error")[0].about == "checkpoint"


def test_the_index_is_built_or_the_command_for_it_is_named(tmp_path: Path) -> None:
    """The command that is named builds what was missing."""
    prefixes = []
    for name, documents in (("a", 300), ("b", 40)):
        prefixes.append(str(tmp_path / name))
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for number in range(documents):
                writer.add_document(np.arange(20 + number % 50) % 500)
    data = f"--data-path 2 {prefixes[0]} 1 {prefixes[1]} --split 80,10,10 --vocab-size 500"
    text = SOUND.replace("--mock-data", data)
    report = check(text)
    (finding,) = found(report, "warning")
    assert finding.about == "index" and finding.place.line == line_of(text, "--data-path")
    state = report.trainings[0].data
    assert (state.indices, state.built) == (6, 0) and set(state.tokens) == set(prefixes)
    command = finding.text.partition("python tools/build_index.py ")[2]
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    assert build_index.main(shlex.split(command)) in (0, None)
    report = check(text)
    assert found(report, "warning") == [] and report.trainings[0].data.built == 6


OLD_STYLE = r"""#!/bin/bash
#SBATCH -t 02:00:00 -N 2 -A abc123
#SBATCH --ntasks-per-node=8
module load rocm/7.1.1 rccl-net-plugin
export MASTER_ADDR=$(ssh `scontrol show hostnames $SLURM_NODELIST | head -n 1` hostname -I | awk '{print $1}')
export OMP_NUM_THREADS=2
TP=2 PP=4 MBS=1 GBS=16
CONFIG_JSON="ds_config.json"
cat <<EOT > $CONFIG_JSON
{
  "train_batch_size" : $GBS,
  "train_micro_batch_size_per_gpu": 4,
  "fp16": { "enabled": true }
}
EOT
ds_args=" --deepspeed"
ds_args=" --deepspeed_config=$CONFIG_JSON ${ds_args}"
options=" --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers 8 --hidden-size 64 \
    --num-attention-heads 4 --micro-batch-size $MBS --global-batch-size $GBS --seq-length 64 \
    --max-position-embeddings 64 --train-iters 10 --lr 6e-5 --fp16 --vocab-size 512 --mock-data"
for i in `scontrol show hostnames $SLURM_NODELIST`; do echo "$i slots=8" >> hostfile; done
srun -u -n$((8*SLURM_NNODES)) -c2 --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=closest \
    bash -c "source vars.sh; python pretrain_gpt_deepspeed.py $options $ds_args"
"""


def test_a_script_in_the_style_of_megatron_deepspeed() -> None:
    """Variables set in the task, options in one string, a JSON from a here-document: its contradiction is found."""
    Path("vars.sh").write_text(
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\nexport MASTER_PORT=29500\n"
    )
    Path("pretrain_gpt_deepspeed.py").touch()
    report = check(OLD_STYLE)
    (finding,) = found(report, "error")
    assert finding.about == "configuration" and "ds_config.json" in finding.text
    assert finding.place.line == line_of(OLD_STYLE, "--micro-batch-size")
    report = check(OLD_STYLE.replace("per_gpu\": 4", "per_gpu\": 1"))
    assert found(report, "error") == []
    one = report.trainings[0]
    assert one.training.sizes.tasks == 16 and one.config is not None and one.config.precision.fp16
    assert {f.about for f in found(report, "warning")} == {"cores", "network", "saving", "requeue", "workers"}
