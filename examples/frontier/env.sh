# shellcheck shell=bash
# Variables of a job on Frontier (Slingshot-11, MI250X), with the reason for each. Sourced by job.sh on the first node
# of a job; source it by hand in an interactive one. Existing values are kept. A variable that is set but empty is unset,
# because some libraries treat an empty value as a setting. Off Frontier (no hsn0) no network and GPU variables are set.
# Sources: OLCF, "PyTorch on Frontier"; HPE, "Running RCCL-Based Applications" (the tuning guide of
# github.com/HewlettPackard/shs-ccl-docs). The module rccl-net-plugin also sets many of them.

# The machine's description (megatron/planner/clusters/), for the placement of ranks and the limits of slow nodes.
if [[ -n ${SITE_CLUSTER:-} ]]; then export MEGATRON_CLUSTER=${MEGATRON_CLUSTER:-$SITE_CLUSTER}; fi

# _choose NAME VALUE: export NAME with its current value, or with VALUE if it has none; unset it if the value is empty.
_choose() {
    local value=${!1-$2}
    if [[ -n $value ]]; then export "$1=$value"; else unset "$1"; fi
}

# Folder of network devices; only tests use another one.
_net=${SITE_NET_FOLDER:-/sys/class/net}

if [[ -e $_net/hsn0 ]]; then
    # --- sockets: used by the ranks to connect, and by RCCL for set-up
    # All four NICs. If start-up hangs, use only hsn0.
    _choose NCCL_SOCKET_IFNAME hsn0,hsn1,hsn2,hsn3
    # Without it gloo uses the interface of the host name, which may be any of them.
    _choose GLOO_SOCKET_IFNAME hsn0,hsn1,hsn2,hsn3

    # --- RCCL
    # With OFI a job of several nodes fails at once if the plugin is not loaded; without this setting it would use TCP. For
    # a job of one node the network is not configured and the plugin does not start.
    if [[ -n ${SLURM_JOB_NUM_NODES:-} ]]; then
        if ((SLURM_JOB_NUM_NODES > 1)); then
            _choose NCCL_NET OFI
        else
            _choose NCCL_NET Socket
        fi
    fi
    # A ring may enter a node by one NIC and leave it by another; found faster on large systems.
    _choose NCCL_CROSS_NIC 1
    # NICs read and write the GCDs' memory themselves (RDMA), up to a distance of one host bridge. OLCF recommends it;
    # on LUMI jobs hang with it (docs/frontier-environment.md).
    _choose NCCL_NET_GDR_LEVEL PHB
    # Lets peers address the whole memory of a GCD over PCIe.
    _choose HSA_FORCE_FINE_GRAIN_PCIE 1

    # --- HIP and torch read these at start. A run that does not source this file sets them itself
    # (megatron/parallel/environment.py, with full reasons).
    # Queues of each priority: one for each communicator of a rank. With HIP's default of 4 some share a queue, in which
    # they wait for each other. 4 and 8 have yet to be measured.
    _choose GPU_MAX_HW_QUEUES 8
    # Separate queues for communication, so that a receive that is posted early does not block products.
    _choose TORCH_NCCL_HIGH_PRIORITY 1

    # --- libfabric, provider cxi
    # Monitor that invalidates the cache of registered memory when pages change. userfaultfd works, too; memhooks deadlocks
    # with the plugin.
    _choose FI_MR_CACHE_MONITOR kdreg2
    # Keeps the provider from calling ROCm functions that may deadlock with RCCL.
    _choose FI_CXI_DISABLE_HOST_REGISTER 1
    # Limits of outstanding completions and sends: higher than the defaults, for large jobs.
    _choose FI_CXI_DEFAULT_CQ_SIZE 131072
    _choose FI_CXI_DEFAULT_TX_SIZE 2048
    # Messages are matched in software once the NIC's own table is full.
    _choose FI_CXI_RX_MATCH_MODE hybrid
    # The rendezvous protocol that is faster with RCCL at scale. It works only with --network=disable_rdzv_get of sbatch.
    _choose FI_CXI_RDZV_PROTO alt_read
    # All messages use it, regardless of size, and nothing is sent before the receiver is ready.
    _choose FI_CXI_RDZV_EAGER_SIZE 0
    _choose FI_CXI_RDZV_THRESHOLD 0
    _choose FI_CXI_RDZV_GET_MIN 0

    # --- MIOpen's databases, by default in the home folder, cause disk I/O errors on shared file systems: one per node.
    _choose MIOPEN_USER_DB_PATH "/tmp/${USER:-user}-miopen-${SLURM_JOB_ID:-0}"
    _choose MIOPEN_CUSTOM_CACHE_DIR "${MIOPEN_USER_DB_PATH-}"

    # --- threads: each task has 7 cores, the usable ones of one L3 region.
    _choose OMP_NUM_THREADS "${CPUS_PER_TASK:-7}"
fi
unset _net
unset -f _choose

# Readers of training data need no setting: they are threads (--num-workers). Processes forked after the network is open
# can hang.

# Let libraries of a cpe module that is not the system's default take precedence over the default ones, as OLCF
# recommends.
prefer_cray_libraries() {
    [[ -z ${CRAY_LD_LIBRARY_PATH:-} ]] ||
        export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Load the modules of SITE_MODULES in order. Returns 1, without loading any, if there is no module command, and 2 if a
# module cannot be loaded.
load_site_modules() {
    [[ -n ${SITE_MODULES:-} ]] || return 0
    command -v module >/dev/null || return 1
    local name flags=$- answer=0
    set +eu # module's own functions read variables that need not be set
    for name in $SITE_MODULES; do
        module load "$name" && continue
        echo "env.sh: module load $name failed: see 'module avail ${name%%/*}', and SITE_MODULES in site.env" >&2
        answer=2
        break
    done
    prefer_cray_libraries
    [[ $flags != *u* ]] || set -u
    [[ $flags != *e* ]] || set -e
    return "$answer"
}
