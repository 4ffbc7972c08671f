#!/bin/bash
# Create the Python environment of the jobs on a login node of Frontier, check it, and pack it for sbcast. If run again, it
# resumes; --fresh starts over. Not run on Frontier yet.
#
#     source examples/frontier/site.env && bash examples/frontier/setup_env.sh [--dry-run] [--fresh] [STEP...]
#
#   --dry-run   print the commands of each step without running them
#   STEP        run only these steps, any of: modules venv torch deepspeed flash project deephyper check pack
#
# Settings, from the environment (defaults in brackets):
#   TORCH_VERSION [2.10.0], TORCH_INDEX [https://download.pytorch.org/whl/rocm7.1]
#                     the pair that OLCF recommends (July 2026); SITE_MODULES in site.env must have the same ROCm
#   DEEPSPEED_VERSION [of requirements/constraints.txt]
#   FLASH_ATTN [0]    1: build flash-attn, which takes long and needs 4 or more cores: better in an interactive job
#   FLASH_ATTN_VERSION [v2.8.4.1-cktile]
#   DEEPHYPER [1]     the paper's search, for tools/tune.py; 0: without it, Optuna searches
#   PYTHON [python3]  of the module cray-python. It must exist on the nodes (/opt, /usr): it is not packed
#   JOBS [4]          number of compilers that run at once; login nodes are shared
set -eEuo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/frontier/site.env
SLURM_JOB_ID=${SLURM_JOB_ID:-setup} source "${SITE_FILE:-$here/site.env}" # no account is needed here
# shellcheck source=examples/frontier/env.sh
source "$here/env.sh"

: "${TORCH_VERSION:=2.10.0}" "${TORCH_INDEX:=https://download.pytorch.org/whl/rocm7.1}"
: "${FLASH_ATTN:=0}" "${FLASH_ATTN_VERSION:=v2.8.4.1-cktile}" "${JOBS:=4}" "${PYTHON:=python3}"
: "${DEEPHYPER:=1}"
constraints=$MEGATRON_ROOT/requirements/constraints.txt
: "${DEEPSPEED_VERSION:=$(sed -n 's/^deepspeed==//p' "$constraints")}"
steps=(modules venv torch deepspeed flash project deephyper check pack)
python=$SITE_VENV/bin/python
dry=0

say() { printf 'setup_env: %s\n' "$*"; }
die() { printf 'setup_env: ERROR: %s\n' "$*" >&2 && exit 2; }

run() { # run COMMAND...: show it, and run it unless this is a dry run
    local word line=+
    for word; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    printf '%s\n' "$line"
    ((dry)) || "$@"
}

pip() { # pip ARGUMENTS...: run pip of the environment, without --user packages
    run env PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip "$@"
}

# List everything that is missing, before doing anything.
missing() {
    local tool
    command -v module >/dev/null || echo "the module command (a login node of Frontier has it)"
    [[ -n $SITE_MODULES ]] || echo "SITE_MODULES: site.env names the modules"
    for tool in tar gzip git; do command -v "$tool" >/dev/null || echo "$tool"; done
    [[ -f $constraints ]] || echo "$constraints: is MEGATRON_ROOT=$MEGATRON_ROOT a clone of this project?"
    [[ -w $(dirname "$SITE_VENV") ]] || echo "write access to $(dirname "$SITE_VENV") (SITE_VENV in site.env)"
    [[ -w $(dirname "$SITE_ENV") ]] || echo "write access to $(dirname "$SITE_ENV") (SITE_ENV in site.env)"
}

step_modules() {
    local name
    for name in $SITE_MODULES; do
        set +eu # module's own functions read variables that need not be set
        run module load "$name" ||
            die "module load $name failed: see 'module avail ${name%%/*}', and SITE_MODULES in site.env"
        set -eu
    done
    run prefer_cray_libraries
    ((dry)) || [[ -n ${ROCM_PATH:-} ]] || die "the rocm module set no ROCM_PATH: see 'module avail rocm'"
    ((dry)) || "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$PYTHON" --version 2>&1) is too old, 3.11 is needed: 'module avail cray-python', or set PYTHON"
}

step_venv() {
    [[ -x $python ]] || run "$PYTHON" -m venv "$SITE_VENV"
    pip install --upgrade pip setuptools wheel pybind11 ninja packaging -c "$constraints"
}

# The wheels include RCCL and hipBLASLt.
step_torch() { pip install "torch==$TORCH_VERSION" --index-url "$TORCH_INDEX"; }

# DS_BUILD_OPS=0: compile none of DeepSpeed's ops. The engine needs none, so none is compiled at the start of a job either.
step_deepspeed() {
    run env DS_BUILD_OPS=0 PYTHONNOUSERSITE=1 "$python" -m pip install --no-build-isolation -c "$constraints" \
        "deepspeed==$DEEPSPEED_VERSION"
}

# AMD's fork, Composable Kernel backend, only for gfx90a. Without it training uses torch's attention.
step_flash() {
    [[ $FLASH_ATTN == 1 ]] || { say "flash-attn: left out (FLASH_ATTN=1 builds it)" && return 0; }
    local source=$SITE_VENV/src/flash-attention
    [[ -d $source ]] || run git clone --branch "$FLASH_ATTN_VERSION" --recurse-submodules \
        https://github.com/ROCm/flash-attention "$source"
    run env FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE GPU_ARCHS=gfx90a MAX_JOBS="$JOBS" PYTHONNOUSERSITE=1 \
        "$python" -m pip install --no-build-isolation "$source"
}

# Install dependencies into the environment; the code stays in the clone, from which jobs use it, with its kernels and
# index helpers built in place.
step_project() {
    run env DS_BUILD_OPS=0 MEGATRON_KERNELS_TARGETS=none PYTHONNOUSERSITE=1 "$python" -m pip install \
        --no-build-isolation -c "$constraints" -e "${MEGATRON_ROOT}[tune]"
    run env -C "$MEGATRON_ROOT" "$python" setup.py -q build_kernels --target hip --arch gfx90a --jobs "$JOBS"
    run env -C "$MEGATRON_ROOT" "$python" setup.py -q build_kernels --target host --jobs "$JOBS"
}

# Print constraints for pip: the exact versions of installed packages, for others those that were tested together.
as_it_is() {
    {
        PYTHONNOUSERSITE=1 "$python" -m pip list --disable-pip-version-check --format=freeze &&
            grep '==' "$constraints"
    } | awk -F== '{ name = tolower($1); gsub(/[-_.]+/, "-", name) } !seen[name]++'
}

# Install DeepHyper, the paper's search. It must not change installed packages or need compilation: otherwise pip refuses
# before it changes anything, and tools/tune.py searches with Optuna.
step_deephyper() {
    [[ $DEEPHYPER == 1 ]] || { say "DeepHyper: left out (DEEPHYPER=1 installs it)" && return 0; }
    local versions=$SITE_VENV/src/versions.txt # src is not packed
    if ! { ((dry)) || { mkdir -p "${versions%/*}" && as_it_is >"$versions"; }; } ||
        ! pip install --only-binary :all: -c "$versions" "deephyper==$(sed -n 's/^deephyper==//p' "$constraints")"; then
        say "WARNING: DeepHyper cannot be installed, see above: it is left out, and the tuner searches with Optuna"
    elif ! run "$python" -c 'from megatron.jobs.search import find_search; find_search("deephyper")'; then
        pip uninstall --yes deephyper
        say "WARNING: DeepHyper does not work here, see above: it is removed again, and the tuner searches with Optuna"
    fi
}

# Import what a job imports. A login node has no GPU, so this checks torch's build, not the device.
step_check() {
    run env DS_ACCELERATOR=cpu "$python" - "$FLASH_ATTN" <<'PY'
import sys
import deepspeed, megatron.kernels, torch
print(f"torch {torch.__version__} for ROCm {torch.version.hip}, deepspeed {deepspeed.__version__}, Python "
      f"{sys.version.split()[0]}")
if sys.argv[1] == "1":
    import flash_attn
    print(f"flash-attn {flash_attn.__version__}")
from megatron.jobs.search import find_search
print(f"tools/tune.py searches with {find_search('auto')}")
if not torch.version.hip:
    sys.exit("this torch is not for ROCm: set TORCH_INDEX")
if not sys.base_prefix.startswith(("/opt/", "/usr")):
    print(f"WARNING: Python is installed in {sys.base_prefix}: jobs start slowly from a shared file system")
PY
    run "$python" "$MEGATRON_ROOT/tools/check_kernels.py" --list
}

# A virtual environment is located through its bin/python and pyvenv.cfg, so it can be unpacked anywhere; only scripts
# such as bin/pip and bin/activate contain the old path, and jobs do not use them.
step_pack() {
    local zip=gzip
    ! command -v pigz >/dev/null || zip=pigz
    run tar -C "$SITE_VENV" --exclude=./src -I "$zip" -cf "$SITE_ENV.part" .
    run mv "$SITE_ENV.part" "$SITE_ENV"
    ((dry)) || say "packed: $SITE_ENV, $(du -h "$SITE_ENV" | cut -f 1)"
}

main() {
    local fresh=0 chosen=() step lacking
    while (($#)); do
        case $1 in
            --dry-run) dry=1 ;;
            --fresh) fresh=1 ;;
            -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && return ;;
            *)
                [[ " ${steps[*]} " == *" $1 "* ]] || die "$1 is not a step: choose from ${steps[*]}"
                chosen+=("$1")
                ;;
        esac
        shift
    done
    lacking=$(missing)
    if [[ -n $lacking ]]; then
        ((dry)) || die "cannot run here, missing: ${lacking//$'\n'/; }. --dry-run shows the commands"
        say "would not run here, missing: ${lacking//$'\n'/; }"
    fi
    ((!fresh)) || run rm -rf "$SITE_VENV" "$SITE_ENV"
    trap 'die "step $step failed, see above; the same command resumes there"' ERR
    for step in "${steps[@]}"; do
        # Every step needs the modules.
        [[ $step == modules || ${#chosen[@]} -eq 0 || " ${chosen[*]} " == *" $step "* ]] || continue
        say "step $step"
        "step_$step"
    done
    ((dry)) || say "ready: $python, $SITE_ENV"
}

main "$@"
