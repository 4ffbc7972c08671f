"""Settings for every test process: few threads, only devices present, repeatable examples."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

# Set before torch or DeepSpeed is imported: the tests run many processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "MEGATRON_TRACE_CACHE", f"{tempfile.gettempdir()}/megatron-traces-{os.getuid()}"
)
os.environ["MEGATRON_KERNELS_MEASURED"] = "none"  # choices do not depend on this machine's speed
_HAS_DRIVER = any(Path(path).exists() for path in ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg"))
if not _HAS_DRIVER:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# A shell starts background jobs with SIGINT ignored, and every program under test would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# `make test` gives the same answer every time; `make prove ONLY=hypothesis` searches further, at
# random.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("test", derandomize=True, database=None, max_examples=25, **_COMMON)
settings.register_profile("prove", print_blob=True, max_examples=1000, **_COMMON)
settings.load_profile("test")

# Variables of a launcher must not reach the tests: they would wait for other ranks.
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_", "PALS_", "TORCHELASTIC_", "MPI_LOCAL")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for _name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANKS]:
    del os.environ[_name]

CAMPAIGN_LIMIT_S = 3600
# A worker gets whole files (--dist loadfile). Those that take longest start first, so that no
# worker is the only one still running at the end.
LONGEST = """
    benchmarks/test_scripts.py parity/test_grid.py planner/timing/test_operations_of_a_run.py examples/test_extend.py
    benchmarks/test_published.py training/report/test_trackers.py training/run/test_loss_mask.py
    planner/dryrun/test_rehearsal.py training/safety/test_faults_in_run.py planner/test_memory_model.py
    training/run/test_run.py checkpoint/test_load_layouts.py tools/test_calibrate.py planner/test_trace.py
    engine/test_deepspeed_engine.py planner/test_zero_plan.py test_newcomer.py planner/timing/test_estimate.py
    planner/search/test_find.py prove/test_hostile.py examples/test_job.py training/safety/test_not_finite.py
    checkpoint/test_huggingface.py tools/preparation/test_preprocess_resume.py
""".split()


def pytest_addoption(parser):
    parser.addoption(
        "--campaign",
        metavar="NAME",
        help="run only the tests of this campaign, marked campaign(NAME); names: `make prove "
        "ONLY=list`",
    )


def _has_gpu():
    if not _HAS_DRIVER:
        return False
    import torch

    return torch.cuda.is_available()


def _partition(config, items, keep):
    """Deselect the items that `keep` rejects."""
    config.hook.pytest_deselected(items=[item for item in items if not keep(item)])
    items[:] = [item for item in items if keep(item)]


def pytest_collection_modifyitems(config, items):
    """Select the tests of one campaign, or those of none; deselect tests of missing devices."""
    campaign = config.getoption("campaign")

    def campaigns(item):
        return {name for mark in item.iter_markers("campaign") for name in mark.args}

    _partition(
        config, items, lambda item: campaign in campaigns(item) if campaign else not campaigns(item)
    )
    if campaign:
        for item in items:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(CAMPAIGN_LIMIT_S))
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _partition(config, items, lambda item: not item.get_closest_marker("gpu"))
    position = {name: number for number, name in enumerate(LONGEST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: position.get(item.path.relative_to(root).as_posix(), len(position)))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """Restore the variables of ranks, and torch's number of threads, after every test."""
    for name in _RANKS:
        monkeypatch.delenv(name, raising=False)
    yield
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() > 1:  # they would be two spinning threads for each core
        torch.set_num_threads(1)


def pytest_collection_finish():
    """Leave modules and tests out of later garbage collections, which would look at all of them."""
    gc.collect()
    gc.freeze()
