#!/bin/bash
# Strong scaling: the same global batch on any number of GCDs. As in Dash et al., 175B runs with 8000 sequences on up to
# 1024 GCDs, and with MODEL=1t, 1T runs with 8016 on up to 3072. experiment.sh explains how to run this script, and
# EXPERIMENTS.md gives the costs.
#     source examples/frontier/site.env && sbatch examples/frontier/strong_scaling.sh
#     MODEL=1t sbatch -N 384 -t 06:00:00 examples/frontier/strong_scaling.sh
#SBATCH -J strong_scaling
#SBATCH -N 128
#SBATCH -t 06:00:00
#SBATCH -C nvme
#SBATCH --network=disable_rdzv_get
#SBATCH --ntasks-per-node=8
#SBATCH -c 7
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH -o %x-%j.out
set -uo pipefail
for root in "${MEGATRON_ROOT:-}" "${SLURM_SUBMIT_DIR:-}" "$(dirname -- "$0")/../.."; do
    [[ ! -f $root/examples/frontier/experiment.sh ]] || break
done
MEGATRON_ROOT=$(cd -- "$root" && pwd)
SCRIPT_NAME=strong_scaling.sh
: "${KINDS:=strong}"
# shellcheck source=examples/frontier/experiment.sh
source "$MEGATRON_ROOT/examples/frontier/experiment.sh" || { echo "source site.env first, then sbatch" >&2 && exit 2; }
main "$@"
