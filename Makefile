# make train   set up, then train a small GPT on real text on this machine
# make test    set up, then run everything that a change can break
# make prove   run the long proofs, which are named campaigns: ONLY=list lists them with their minutes
# make kernels compile csrc/kernels/ with every available compiler: for GPUs and this CPU
# make bench   set up, then compare training speed with other frameworks
# make gpu-check
#              test and measure the GPUs here, most valuable steps first, within BUDGET; run again to continue
# make help    the other targets and the settings
#
# Settings, on the command line:
#   PYTHON       interpreter that creates the virtual environment (3.11 or newer)
#   VENV         path of the environment; in an existing one setup installs or changes what this project
#                needs, and names each package: to leave yours as it is, give the path of a new one
#   TORCH        pip's requirement for torch, e.g. for ROCm
#                  make train TORCH="torch --index-url https://download.pytorch.org/whl/rocm7.1"
#                default: the tested version, unless the environment has a torch already
#   SYSTEM_SITE  1: let a new environment use the system's packages, for an installed torch (modules, containers)
#   WORKERS      processes that run tests side by side; 3 keep 2 cores busy, since tests wait for their processes
#   TESTS        arguments of pytest, e.g. make test TESTS=tests/parity
#   ONLY         campaigns of make prove, e.g. make prove ONLY="kills parity", or steps of make gpu-check
#   PROVE        additional arguments for the campaigns of make prove
#   BUDGET       time limit of make gpu-check: 90s, 10m, 1h. It sets up nothing if it finds a torch: that of PYTHON if
#                given, otherwise that of VENV, otherwise that of python3
#   THERE, ARCH  for make gpu-kit: an interpreter of the same version as the GPU machine's, and the kind of GPU to build
#                kernels for
#   BENCH        arguments of benchmarks/bench.py, e.g. make bench BENCH='--only W1'
#   MEGATRON_KERNELS_TARGETS
#                targets of the kernels to build during set-up, e.g. host,hip; none: no kernels; default: host and
#                the kind of GPU that torch was built for

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?=
SYSTEM_SITE ?=
WORKERS     ?= 3
TESTS       ?=
BENCH       ?=
ONLY        ?=
PROVE       ?=
BUDGET      ?= 10m

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.ready
# Inputs of the environment; after a change it is set up again.
MADE_FROM := pyproject.toml setup.py $(filter-out requirements/bench.txt,$(wildcard requirements/*.txt)) \
             $(wildcard csrc/*.[ch]pp csrc/*/*.cpp csrc/*/*.h)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Without .pyc files, each of the many test processes would compile the library, and pytest would compile all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test quick prove lint bench gpu-check gpu-kit kernels kernels-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make train   set up, then train a small GPT on text from this machine (about 5 minutes on 2 cores)'
	@echo 'make test    set up, then run everything that a change can break (about 6 minutes on 2 quiet cores)'
	@echo 'make quick   the fast tests only (about a minute)'
	@echo 'make prove   the long proofs, hours in all; ONLY=list lists them, ONLY=kills runs one'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   set up, then compare with other frameworks (about 11 minutes on 2 quiet cores); BENCH=--quick'
	@echo 'make gpu-check'
	@echo '             test and measure the GPUs here, and write runs/gpu/REPORT.md; BUDGET=10m; run again to continue'
	@echo 'make gpu-kit pack what make gpu-check needs on a machine without a network: THERE=its-python ARCH=sm_90'
	@echo 'make setup   only set up the virtual environment, $(VENV), with dependencies and compiled csrc/'
	@echo 'make kernels compile csrc/kernels/, list the libraries and compare each kernel with torch'
	@echo 'make kernels-check'
	@echo '             print registers, LDS and occupancy of AMD GPU kernels; fail if one breaks the rules; needs hipcc'
	@echo 'make clean   remove caches and built files; the environment and runs/ stay'
	@echo
	@echo 'Settings: PYTHON, VENV, TORCH, SYSTEM_SITE, WORKERS, TESTS, ONLY, BENCH, BUDGET; see the head of the Makefile.'

setup: $(STAMP)

$(STAMP): $(MADE_FROM)
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' SYSTEM_SITE='$(SYSTEM_SITE)' bash requirements/setup.sh
	@touch $@

train: $(STAMP)
	@$(PY) tools/train_example.py

# Tests open pages in Chromium if it is installed; as root on Debian it is installed first.
BROWSER := $(VENV)/.browser

$(BROWSER): | $(STAMP)
	@command -v chromium >/dev/null || bash requirements/setup.sh browser
	@touch $@

test: $(STAMP) $(BROWSER)
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

quick: $(STAMP)
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow' $(TESTS)

prove: $(STAMP)
	@$(PY) -m tests.prove $(ONLY) --args='$(PROVE)'

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet . || { echo "not formatted: $(PY) -m ruff format ."; exit 1; }
	@$(PY) -m mypy megatron tools/*.py tools/megatron_conversion tools/megatron_inference tools/megatron_inspection tools/megatron_preparation tools/megatron_report benchmarks/*.py benchmarks/faults

# Peers are in a separate folder, see requirements/bench.txt; if they are missing (no network), their rows say so.
PEERS := $(VENV)/peers/.ready

$(PEERS): requirements/bench.txt | $(STAMP)
	@$(PY) -m pip install -qq --no-deps --upgrade --target $(VENV)/peers -r $< && touch $@ || echo 'bench: no peers from PyPI'

bench: $(STAMP) $(PEERS)
	@$(PY) benchmarks/bench.py $(BENCH)

# An environment with torch is used as it is; otherwise one is set up.
HAS_TORCH := import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or not u.find_spec("torch"))
ifneq ($(filter gpu-check,$(MAKECMDGOALS)),)
WITH_TORCH := $(shell for py in $(if $(filter file,$(origin PYTHON)),,$(PYTHON)) $(PY) $(PYTHON); do \
                  "$$py" -c '$(HAS_TORCH)' 2>/dev/null && echo "$$py" && break; done)
endif

gpu-check: $(if $(WITH_TORCH),,$(STAMP))
	@$(or $(WITH_TORCH),$(PY)) benchmarks/gpu_check.py --budget $(BUDGET) $(if $(ONLY),--only $(ONLY))

gpu-kit: $(STAMP)
	@$(PY) benchmarks/gpu_kit.py $(if $(THERE),--python $(THERE)) $(if $(ARCH),--arch $(ARCH))

kernels: $(STAMP)
	@$(PY) setup.py -q build_kernels
	@$(PY) tools/check_kernels.py

kernels-check: $(STAMP)
	@$(PY) benchmarks/kernel_resources.py --jobs $(WORKERS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info $(STAMP)
	rm -f megatron/data/_index_helpers*.so megatron/pipeline/_schedule_clock*.so
	rm -rf megatron/kernels/lib
	find megatron tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
