"""Settings for every test process: few threads, no device that is not there, repeatable random examples."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

# Before anything imports torch or DeepSpeed: the tests run many processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_HAS_DRIVER = any(Path(path).exists() for path in ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg"))
if not _HAS_DRIVER:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# A shell starts what it runs in the background with SIGINT ignored, which every program under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

_COMMON = {"deadline": None, "max_examples": 50, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", **_COMMON)  # type: ignore[arg-type]
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)  # type: ignore[arg-type]
settings.load_profile("ci" if os.environ.get("CI") else "local")

# What a launcher leaves in the environment must not reach the tests: they would wait for other ranks.
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_", "PALS_", "TORCHELASTIC_", "MPI_LOCAL")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for _name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANKS]:
    del os.environ[_name]


def _missing_accelerator() -> str:
    """Why tests marked gpu cannot run; "" when they can."""
    if not _HAS_DRIVER:
        return "needs a CUDA or ROCm device; this machine has none"
    import torch

    if not torch.cuda.is_available():
        return f"needs a CUDA or ROCm device; torch {torch.__version__} sees none"
    return ""


_START = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-within", type=float, metavar="SECONDS",
        help="where time is limited: slow tests come last, and those that would begin later than this are skipped",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow tests last where time is limited; skip what this machine cannot run, with the reason."""
    if config.getoption("slow_within") is not None:
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_accelerator() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures, which may take as long as the test."""
    within = item.config.getoption("slow_within")
    if within is not None and item.get_closest_marker("slow") and time.monotonic() - _START > within:
        pytest.skip(f"slow, and the {within:.0f} s of --slow-within are over")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test leaves the variables of ranks as it found them."""
    for name in _RANKS:
        monkeypatch.delenv(name, raising=False)
