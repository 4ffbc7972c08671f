#!/bin/bash
# Throughput as a function of tensor-parallel size, pipeline-parallel size (with a fixed batch, and with a batch that grows
# so that the bubble is fixed), global batch and micro-batch. experiment.sh explains how to run this script, and
# EXPERIMENTS.md gives the costs.
#     source examples/frontier/site.env && sbatch examples/frontier/sweep_tp_pp_mbs.sh
#     KINDS="tp pp" examples/frontier/sweep_tp_pp_mbs.sh --dry-run
#SBATCH -J sweep_tp_pp_mbs
#SBATCH -N 16
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
SCRIPT_NAME=sweep_tp_pp_mbs.sh
: "${KINDS:=tp pp pp-bubble batch micro-batch}" "${MODEL:=22b}"
# shellcheck source=examples/frontier/experiment.sh
source "$MEGATRON_ROOT/examples/frontier/experiment.sh" || { echo "source site.env first, then sbatch" >&2 && exit 2; }
main "$@"
