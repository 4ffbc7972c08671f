#!/usr/bin/env bash
# Makes or completes the virtual environment; called by `make setup` with PYTHON, VENV, TORCH and SYSTEM_SITE.
# Run again, it installs only what is missing or what changed. `setup.sh browser` installs Chromium for tests.
set -euo pipefail

die() { echo "setup: $*" >&2; exit 1; }
say() { echo "setup: $*"; }

install_debian() {  # install_debian PACKAGE...: as root on Debian and its kin; otherwise fails
    [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

check_python() {  # check_python INTERPRETER
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "$1 is $("$1" --version 2>&1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12"
}

oldest_torch=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
readonly oldest_torch

# Says whether the environment has a torch that is new enough.
has_torch() {
    "$VENV/bin/python" - "$oldest_torch" <<'PY' 2>/dev/null
import re, sys
from importlib.metadata import version
here, oldest = (list(map(int, re.findall(r"\d+", v)[:2])) for v in (version("torch"), sys.argv[1]))
sys.exit(here < oldest)
PY
}

make_venv() {
    command -v "$PYTHON" >/dev/null || die "$PYTHON is not there: make PYTHON=/path/to/python3.12"
    check_python "$PYTHON"
    say "creating $VENV with $("$PYTHON" --version)"
    local options=()
    [[ ${SYSTEM_SITE:-} == 1 ]] && options=(--system-site-packages)
    "$PYTHON" -m venv ${options[@]+"${options[@]}"} "$VENV" && return
    # Debian's python3 comes without ensurepip.
    rm -rf "$VENV"
    local version
    version=$("$PYTHON" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
    install_debian "python$version-venv" || install_debian python3-venv ||
        die "$PYTHON -m venv failed (see above). On Debian and Ubuntu: sudo apt-get install python$version-venv"
    "$PYTHON" -m venv ${options[@]+"${options[@]}"} "$VENV"
}

install_torch() {
    if [[ -n $TORCH ]]; then
        say "installing $TORCH"
        # Unquoted: the setting may hold several of pip's arguments.
        # shellcheck disable=SC2086
        pip install $TORCH
    elif has_torch; then
        say "using torch $("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
    else
        if [[ -d /opt/rocm ]] || command -v rocminfo >/dev/null; then
            say "ROCm is here, but TORCH is not set: the default torch may not be built for it; see the Makefile's head"
        fi
        say "installing torch and what it needs"
        pip install -r requirements/torch.txt
    fi
    has_torch || die "torch $oldest_torch or newer is needed; this environment has another"
}

# Headers of Python are part of a working compiler here.
check_compiler() {
    local headers
    headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null; then
        install_debian g++ || die "no C++ compiler, which csrc needs"
    fi
    if [[ ! -e $headers/Python.h ]]; then
        install_debian python3-dev || die "no Python.h in $headers, which csrc needs"
    fi
}

kernel_targets() {
    "$VENV/bin/python" -c 'import torch
print("host,hip" if torch.version.hip else "host,cuda" if torch.version.cuda else "host")'
}

pip() { "$VENV/bin/python" -m pip "$@" -qq; }  # errors only

# Of `make test`: without a browser the tests that open a page are skipped.
if [[ ${1:-} == browser ]]; then
    install_debian --no-install-recommends chromium || say "no chromium: tests that need a browser are skipped"
    exit 0
fi

# An environment that was not made here is the user's own: what is changed in it is said.
if [[ ! -x $VENV/bin/python ]]; then
    make_venv
    touch "$VENV/.made-by-setup"
elif [[ ! -e $VENV/.made-by-setup ]]; then
    say "$VENV is there already: packages that are missing or of other versions will be installed in it"
    before=$("$VENV/bin/python" -m pip freeze)
fi
check_python "$VENV/bin/python"
"$VENV/bin/python" -m pip --version >/dev/null || die "$VENV has no pip: remove it and run make again"

readonly constraints=requirements/constraints.txt
pip install -c $constraints --upgrade pip setuptools wheel
install_torch
check_compiler
say "installing dependencies"
# DeepSpeed is built from source: it wants to see torch, so it is not built apart from it, and no op is compiled.
pip install -c $constraints pybind11 ninja numpy
# Kernels are built for this processor and for the kind of GPU that torch is for.
export MEGATRON_KERNELS_TARGETS=${MEGATRON_KERNELS_TARGETS:-$(kernel_targets)}
DS_BUILD_OPS=0 pip install -c $constraints --no-build-isolation -e '.[dev]'
if [[ -n ${before:-} ]]; then
    say "changed in $VENV (<: before, >: now):"
    diff <(echo "$before") <("$VENV/bin/python" -m pip freeze) | grep '^[<>]' | sed 's/^/setup:   /' || true
fi
# What pip says of a kernel that was not built is not shown, and the times that were measured neither.
inventory() { "$VENV/bin/python" tools/check_kernels.py --list | sed '/ ms$/d; s/^/setup: /'; }
kernels=$(inventory)
if [[ $kernels == *--measure* ]]; then
    say "measuring which implementations are the fastest on this CPU"
    "$VENV/bin/python" tools/check_kernels.py --measure >/dev/null || say "not measured: runs use the defaults"
    kernels=$(inventory)
fi
echo "$kernels"
say "ready: $VENV with $("$VENV/bin/python" -c 'import torch
kind = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
print(f"torch {torch.__version__} ({kind} build, {torch.cuda.device_count()} device(s) visible)")')"
