#!/bin/bash
# Weak scaling: the global batch grows with the number of replicas. As in Dash et al., 175B runs on up to 1024 GCDs with
# 640 sequences per replica, and with MODEL=1t, 1T runs on up to 3072 with 1600. experiment.sh explains how to run this
# script, and EXPERIMENTS.md gives the costs.
#     source examples/frontier/site.env && sbatch examples/frontier/weak_scaling.sh
#     MODEL=1t sbatch -N 384 -t 04:00:00 examples/frontier/weak_scaling.sh
#SBATCH -J weak_scaling
#SBATCH -N 128
#SBATCH -t 02:00:00
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
SCRIPT_NAME=weak_scaling.sh
: "${KINDS:=weak}"
# shellcheck source=examples/frontier/experiment.sh
source "$MEGATRON_ROOT/examples/frontier/experiment.sh" || { echo "source site.env first, then sbatch" >&2 && exit 2; }
main "$@"
