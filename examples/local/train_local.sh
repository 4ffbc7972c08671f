#!/bin/bash
# Train on this machine: on its GPUs, or on its CPU if it has none.
#     bash examples/local/train_local.sh [flags of pretrain_gpt.py]
# Without flags a tiny GPT trains briefly on synthetic tokens. Another run with the same RUN_NAME resumes.
#
# Settings, from the environment:
#   PROCESSES   [number of GPUs, or 1]      PYTHON     [.venv/bin/python of this clone]
#   PRESET      [tiny]; empty: none         RUN_NAME   [local]: folder below SITE_RUNS
#   SITE_RUNS   [runs of this clone]        DRY_RUN    1: check the flags and print the command
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
: "${PYTHON:=$root/.venv/bin/python}" "${RUN_NAME:=local}" "${SITE_RUNS:=$root/runs}"
PRESET=${PRESET-tiny}
if ! command -v "$PYTHON" >/dev/null; then
    echo "train_local.sh: no Python at PYTHON=$PYTHON: run make setup, or set PYTHON" >&2
    exit 2
fi
if [[ -z ${PROCESSES:-} ]]; then
    PROCESSES=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
if [[ ! $PROCESSES =~ ^[1-9][0-9]*$ ]]; then
    echo "train_local.sh: PROCESSES=$PROCESSES: give a number of at least 1" >&2
    exit 2
fi

save=$SITE_RUNS/$RUN_NAME
flags=(--save "$save" --load "$save" --log-interval 10)
[[ -z $PRESET ]] || flags=(--preset "$PRESET" "${flags[@]}")
(($#)) || flags+=(--mock-data --train-iters 50 --eval-iters 0)

command=("$PYTHON" "$root/pretrain_gpt.py" "${flags[@]}" "$@")
if ((PROCESSES > 1)); then # torchrun is fine here; on a cluster srun starts the processes
    command=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" "${command[@]:1}")
fi
printf '+'
printf ' %q' "${command[@]}"
printf '\n'
[[ ${DRY_RUN:-0} == 1 ]] || exec "${command[@]}"
"$PYTHON" "$root/pretrain_gpt.py" "${flags[@]}" "$@" --complete --world-size "$PROCESSES" --print-config >/dev/null
