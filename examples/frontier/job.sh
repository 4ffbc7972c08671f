# shellcheck shell=bash
# The body of every job of this folder. The train_*.sbatch scripts set their recipe, source this file and call train_job
# with their arguments; experiments call prepare_environment, run_preflight and launch_training themselves. Sourcing
# defines functions and settings and starts nothing. Not run on Frontier yet; tests/slurm runs it unchanged under a real
# Slurm.
#
# A job has these steps, with their output in SITE_RUNS/RUN_NAME/logs/JOB/RESTART/:
#   check       pretrain_gpt.py resolves the configuration and looks for its files: a mistake ends the job at once
#   environment the packed Python environment and the code are copied to every node's NVMe drive
#   preflight   every device and node is tested; slow and dead nodes are left out if there are spare ones
#   training    on the good nodes, from the newest checkpoint. After the loss of a process or node it restarts within the
#               job; spare good nodes wait to take the place of lost ones
# The job ends with one of these exit codes (or that of the program, or 128 + the signal that killed a task):
#   0 training is complete, or saved and requeued            2 error in the command or in site.env
#   3 started too often without a new checkpoint             4 too few good nodes        75 a rank was lost
#
# Settings, from the environment:
#   PRESET           a preset other than the recipe's; empty: none
#   RECIPE           frontier (ours) or paper (Dash et al., fp16, plain placement)
#   RUN_NAME         folder in SITE_RUNS, also for checkpoints: a job with the same name resumes. Default: the job's
#                    name, plus -paper for RECIPE=paper, -mock for --mock-data, and the number of a job array's task
#   NODES_NEEDED     nodes to train on; the rest of the allocation are spares. Default: all
#   MIN_NODES        if more nodes are lost than spare ones are left, continue on at least this many, with the same batch.
#                    Default: NODES_NEEDED
#   MAX_RESTARTS     number of restarts within the job, which need no new start of all processes; 0: never. A node that is
#                    lost ends the job unless it was submitted with sbatch --no-kill, as the scripts here are
#   PREFLIGHT        1: test the nodes first; 0: no test.  PREFLIGHT_FLAGS: flags for tools/preflight.py measure
#   REQUEUE          1: requeue at the end of the job's time, and after a lost rank if the job cannot restart; 0: never
#   MAX_STARTS       number of starts from the same checkpoint after which the job is no longer requeued
#   GPU_VISIBILITY   one: each task sees its own GCD; all: each sees all eight; none: srun gets no flags for GPUs
#   DEVICE           gpu, or cpu for trials (gloo, no modules)
#   SRUN_WAIT        seconds from the end of one task to that of all others; with restarts within the job, from the end of
#                    the job, as the first task to know it writes into the file "end" in the logs. Then the rest is killed
#   TASKS_PER_NODE, CPUS_PER_TASK, SRUN_FLAGS, MASTER_PORT, DRY_RUN (1: check the flags and the modules here, and print
#                    the commands and variables; nothing is started)

: "${MEGATRON_ROOT:=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)}"
# shellcheck source=examples/frontier/site.env
source "${SITE_FILE:-$MEGATRON_ROOT/examples/frontier/site.env}" || exit 2
: "${DEVICE:=gpu}" "${RECIPE:=frontier}" "${PREFLIGHT:=1}" "${REQUEUE:=1}" "${MAX_STARTS:=3}" "${DRY_RUN:=0}"
: "${MAX_RESTARTS:=100}"
: "${TASKS_PER_NODE:=8}" "${CPUS_PER_TASK:=7}"
# When a rank is lost, the others name it and exit. srun must not kill them before that, only if they do not exit.
: "${SRUN_WAIT:=600}"
: "${MASTER_PORT:=3442}"
if [[ $DEVICE == cpu ]]; then
    : "${GPU_VISIBILITY:=none}" "${OMP_NUM_THREADS:=1}"
    export OMP_NUM_THREADS
else
    : "${GPU_VISIBILITY:=one}"
fi
export USER=${USER:-$(id -un)} # part of the path of a node's drive
unset "${!SQUEUE_@}" # squeue also reads filters from variables: a job that they hide would seem to have ended
RUN_NAME_GIVEN=${RUN_NAME:-}
: "${RUN_NAME:=${SLURM_JOB_NAME:-${MODEL:-run}}}"
# The user's value, before env.sh sets it; also for scripts that a job starts.
export NCCL_NET_GIVEN=${NCCL_NET_GIVEN-${NCCL_NET:-}}
# shellcheck source=examples/frontier/env.sh
source "$MEGATRON_ROOT/examples/frontier/env.sh"
RUN=$SITE_RUNS/$RUN_NAME
# In a job array, SLURM_JOB_ID of one task is the number of the whole array: Slurm's commands would apply to all tasks.
JOB=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID}
: "${JOB:=${SLURM_JOB_ID:-dry}}"
RESTART=${SLURM_RESTART_COUNT:-0}
JOB_LOGS=$RUN/logs/$JOB
: "${LOGS:=$JOB_LOGS/$RESTART}"
PYTHON=$SITE_VENV/bin/python
CODE=$MEGATRON_ROOT
GOOD_HOSTS=
RESTARTS=0 # number of restarts within the job of this launch

say() { printf ' job %s: %s\n' "$JOB" "$*"; }
complain() { printf ' job %s: ERROR: %s\n' "$JOB" "$*" >&2; }

# show COMMAND...: print it as a line that can be pasted into a shell.
show() {
    local word line=+
    for word; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    printf '%s\n' "$line"
}

# run COMMAND...: show it, and run it (not with DRY_RUN=1).
run() {
    show "$@"
    [[ $DRY_RUN == 1 ]] || "$@"
}

# flag_value NAME FLAGS...: print the last value of the flag NAME in FLAGS; nothing if it does not occur.
flag_value() {
    local name=$1 found=
    shift
    while (($#)); do
        case $1 in
            "$name"=*) found=${1#*=} ;;
            "$name") found=${2-} ;;
        esac
        shift
    done
    printf '%s' "$found"
}

# has_flag "NAME NAME..." FLAGS...: test whether FLAGS contain one of the names.
has_flag() {
    local names=" $1 " flag
    shift
    for flag; do [[ $names != *" ${flag%%=*} "* ]] || return 0; done
    return 1
}

# Print the number of nodes of the allocation; outside a job, the number in the script's header.
allocated_nodes() {
    local asked
    asked=$(sed -n 's/^#SBATCH *-N *\([0-9][0-9]*\).*/\1/p' "$0" 2>/dev/null | head -n 1)
    printf '%s' "${SLURM_JOB_NUM_NODES:-${asked:-1}}"
}

# first_address NODE: print its IP address, as resolved on the node.
first_address() {
    local here=${SLURMD_NODENAME:-$(hostname -s)}
    if [[ -z $1 || $1 == "$here" || $DRY_RUN == 1 ]]; then
        hostname -i
    else
        srun -N 1 -n 1 -c 1 --overlap -w "$1" hostname -i
    fi | awk '{ for (i = 1; i <= NF; i++) if ($i ~ /^[0-9.]+$/) { print $i; exit } }'
}

# task_flags NODES: set FLAGS to srun's flags for TASKS_PER_NODE tasks on each of NODES nodes, as OLCF recommends.
task_flags() {
    FLAGS=(-N "$1" -n "$(($1 * TASKS_PER_NODE))" "--ntasks-per-node=$TASKS_PER_NODE" -c "$CPUS_PER_TASK")
    FLAGS+=(--kill-on-bad-exit=0)
    # A task that has ended, with its node or because it was replaced, must not end the others.
    if ((RESTARTS)); then FLAGS+=(--wait=0 --no-kill); else FLAGS+=("--wait=$SRUN_WAIT"); fi
    case $GPU_VISIBILITY in
        one) FLAGS+=(--gpus-per-task=1 --gpu-bind=closest) ;;
        all) FLAGS+=("--gpus-per-node=$TASKS_PER_NODE") ;;
    esac
    # Without this flag Slurm allocates no Slingshot resources to a step on one node, and the network plugin cannot start.
    [[ $1 -gt 1 || ! -e ${SITE_NET_FOLDER:-/sys/class/net}/hsn0 ]] || FLAGS+=(--network=single_node_vni)
    local more
    read -r -a more <<<"${SITE_SRUN_FLAGS:-} ${SRUN_FLAGS:-}"
    FLAGS+=(${more[@]+"${more[@]}"})
}

# on_every_node COMMAND...: run it once on each node of the allocation.
on_every_node() {
    run srun -N "$(allocated_nodes)" -n "$(allocated_nodes)" --ntasks-per-node=1 -c 1 --kill-on-bad-exit=1 "$@"
}

# send_tar FILE NAME CHECK...: broadcast FILE, unpack it as SITE_NVME/NAME on every node, run CHECK with that folder as
# last argument. sbcast leaves parts of files behind when it fails, and a node may be full: the folder gets its name only
# after the check.
send_tar() {
    local file=$1 folder=$SITE_NVME/$2 unpack
    shift 2
    run sbcast -pf "$file" "$folder.tar" || return
    # shellcheck disable=SC2016  # for the shell of the node
    unpack='rm -rf "$0" "$0.part" && mkdir "$0.part" && tar -xf "$0.tar" -C "$0.part" && rm "$0.tar"'
    # shellcheck disable=SC2016
    on_every_node bash -c "$unpack"' && mv "$0.part" "$0" && "$@" "$0"' "$folder" "$@"
}

# Export the revision of the code for the passport.json of checkpoints: the copy of the code on the nodes has no .git.
export_revision() {
    MEGATRON_REVISION=$(git -C "$MEGATRON_ROOT" rev-parse HEAD 2>/dev/null) || return 0
    git -C "$MEGATRON_ROOT" diff --quiet HEAD 2>/dev/null || MEGATRON_REVISION+=" dirty"
    export MEGATRON_REVISION
}

# Print the variables that a training gets for network, devices and threads, as one line.
show_environment() {
    local name words=()
    while read -r name; do
        words+=("$name=${!name}")
    done < <(compgen -e | grep -E '^(FI|GLOO|GPU|HIP|HSA|MASTER|MIOPEN|NCCL|OMP|ROCR|TORCH)_|^MEGATRON_CLUSTER$')
    show export ${words[@]+"${words[@]}"}
}

# For a dry run: test whether this node (perhaps a login node) can load the modules, without keeping them loaded.
# Returns 2 if it cannot.
try_modules() {
    # shellcheck disable=SC2086  # a list
    show module load $SITE_MODULES
    if ! command -v module >/dev/null; then
        say "not checked: modules (there is no module command here)"
    elif ! (load_site_modules >/dev/null); then
        complain "modules are missing here (SITE_MODULES=$SITE_MODULES)"
        return 2
    fi
}

# Copy Python and the code to every node's own drive if SITE_ENV exists; otherwise use them from the shared file system.
# Sets PYTHON and CODE. Returns 2 if there is no Python or a module is missing.
prepare_environment() {
    local code=0
    [[ $DRY_RUN != 1 ]] || show_environment
    if [[ $DEVICE == gpu ]]; then
        if [[ $DRY_RUN == 1 ]]; then
            try_modules || code=$?
        elif ! load_site_modules; then
            complain "modules are missing (SITE_MODULES=$SITE_MODULES): is this $SITE_CLUSTER? DEVICE=cpu needs none"
            return 2
        fi
        [[ -z ${MIOPEN_USER_DB_PATH:-} ]] || on_every_node mkdir -p "$MIOPEN_USER_DB_PATH"
    fi
    local start=$SECONDS job_code=code.$JOB.$RESTART sent=0
    # Print the output of the imports only if they fail: every node would print it.
    # shellcheck disable=SC2016
    local imports='said=$("$1/bin/python" -c "import torch, deepspeed" 2>&1) || { echo "$said" >&2 && exit 1; }'
    if [[ ! -f $SITE_ENV || -z $SITE_NVME ]]; then
        say "WARNING: no packed environment (SITE_ENV=$SITE_ENV): Python starts from $SITE_VENV. OLCF measured 57 s" \
            "from Orion and 244 s from a home folder on 8 nodes, 2 s from NVMe. setup_env.sh packs it."
    elif send_tar "$SITE_ENV" environment bash -c "$imports" check; then
        PYTHON=$SITE_NVME/environment/bin/python sent=1
        # A snapshot of the code, so that a later edit in the clone cannot affect only some of the ranks.
        run mkdir -p "$LOGS"
        if run tar -C "$MEGATRON_ROOT" --exclude=__pycache__ -cf "$LOGS/code.tar" megatron tools pretrain_gpt.py &&
            send_tar "$LOGS/code.tar" "$job_code" test -s; then
            CODE=$SITE_NVME/$job_code
            export_revision
        else
            say "WARNING: the code could not be sent to the nodes; it is read from $MEGATRON_ROOT"
        fi
        [[ $DRY_RUN == 1 ]] || rm -f "$LOGS/code.tar"
        say "environment: on $SITE_NVME of every node after $((SECONDS - start)) s"
    else
        say "WARNING: $SITE_ENV could not be unpacked on every node (see above): Python starts from $SITE_VENV," \
            "which takes a minute or more"
    fi
    if [[ $sent == 1 || -x $PYTHON ]]; then return "$code"; fi
    complain "no Python in SITE_VENV=$SITE_VENV: run examples/frontier/setup_env.sh, or set SITE_VENV in site.env"
    return 2
}

# Test all nodes of the allocation. Sets GOOD_HOSTS to the file of the nodes to train on, with spare ones if the job can
# restart. Returns 4 if too few are good.
run_preflight() {
    local nodes needed folder=$LOGS/preflight code=0 good=0 spares=
    nodes=$(allocated_nodes)
    needed=${NODES_NEEDED:-$nodes}
    [[ $DRY_RUN == 1 ]] || mkdir -p "$folder"
    local more backend=nccl
    [[ $DEVICE != cpu ]] || backend=gloo
    read -r -a more <<<"${PREFLIGHT_FLAGS:-}"
    # A hanging task is abandoned soon after the others have ended; the step has a time limit.
    RESTARTS=0 NODES=$nodes HOSTS='' SRUN_WAIT=30 SRUN_FLAGS="${SRUN_FLAGS:-} --time=${PREFLIGHT_MINUTES:-10}" LOGS=$folder \
        launch "$CODE/tools/preflight.py" measure --cluster "$SITE_CLUSTER" --out "$folder" \
        --backend "$backend" ${more[@]+"${more[@]}"} || code=$?
    [[ $DRY_RUN != 1 ]] || { GOOD_HOSTS=; return 0; }
    # A dead node affects srun's exit code, but not the verdict on the others.
    [[ ! -f $folder/good_hosts ]] || good=$(grep -c . "$folder/good_hosts")
    if ((good >= needed)); then
        GOOD_HOSTS=$folder/hosts
        ((RESTARTS == 0 || good == needed)) || spares=", $((good - needed)) spare"
        head -n "$((RESTARTS ? good : needed))" "$folder/good_hosts" >"$GOOD_HOSTS"
        say "preflight: training on $needed of $nodes node(s)$spares$(bad_hosts_line ', without ')"
        return 0
    fi
    ((code == 4)) || failing_tasks "$folder" # 4 is a verdict, not a failure
    ((code != 2)) || return 2
    complain "preflight: no $needed good nodes among $nodes (exit code $code, $folder)." \
        "$(bad_hosts_line 'To submit again without the bad ones: sbatch --exclude=')"
    [[ ! -s $folder/bad_hosts ]] || requeue_without "$folder/bad_hosts"
    return 4
}

# bad_hosts_line TEXT: print TEXT and the bad hosts of the last preflight, with commas; nothing if there are none.
bad_hosts_line() {
    [[ -s $LOGS/preflight/bad_hosts ]] || return 0
    printf '%s%s' "$1" "$(paste -s -d , "$LOGS/preflight/bad_hosts")"
}

# launch PROGRAM FLAGS...: start PROGRAM by srun, TASKS_PER_NODE tasks on each node; returns the exit code of the job, if
# its processes have written it, or else that of srun, the highest of all tasks. Optional variables: NODES (number), HOSTS (a,b,c; default: GOOD_HOSTS), MASTER_ADDR, MASTER_PORT,
# MEGATRON_JOB_TOKEN, LOGS, SRUN_FLAGS. Several may run at once in subshells, each with its own port.
launch() {
    local nodes=${NODES:-} hosts=${HOSTS:-} first code=0 FLAGS step
    if [[ -z $hosts && -n $GOOD_HOSTS ]]; then
        hosts=$(paste -s -d , "$GOOD_HOSTS")
        : "${nodes:=$(grep -c . "$GOOD_HOSTS")}"
    fi
    : "${nodes:=${NODES_NEEDED:-$(allocated_nodes)}}"
    task_flags "$nodes"
    first=${hosts%%,*}
    if [[ -n ${HOSTS:-} || (-n $hosts && $nodes -lt $(allocated_nodes)) ]]; then
        FLAGS+=(-w "$(compressed "$hosts")")
    elif [[ -z $hosts && -n ${SLURM_JOB_NODELIST:-} && $DRY_RUN != 1 ]]; then
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    fi
    [[ $DRY_RUN == 1 ]] || mkdir -p "$LOGS"
    local -x MASTER_ADDR=${MASTER_ADDR:-$(first_address "$first")} MASTER_PORT=$MASTER_PORT
    # The token keeps others on the network from guessing the keys through which the ranks exchange their state.
    local -x MEGATRON_JOB_TOKEN=${MEGATRON_JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
    # A step on one node does not need the network plugin, even in a larger job.
    [[ -z ${NCCL_NET:-} || -n ${NCCL_NET_GIVEN:-} || $nodes -gt 1 ]] || local -x NCCL_NET=Socket
    # A supervisor that hangs, or whose process does, must not hold the nodes until the end of the job's time.
    ((RESTARTS == 0)) || local -x MEGATRON_JOB_END=$LOGS/end
    step=("${FLAGS[@]}" "--error=$LOGS/task_%t.err" "$PYTHON" -u "$@")
    show srun "${step[@]}"
    [[ $DRY_RUN != 1 ]] || return 0
    rm -f "$LOGS/end"
    forwarding srun "${step[@]}" 2>"$LOGS/srun.err" || code=$?
    cat "$LOGS/srun.err" >&2
    find "$LOGS" -maxdepth 1 -name 'task_*.err' -empty -delete
    return "$code"
}

# compressed a1,a2,a4: print Slurm's form a[1-2,4], because thousands of names do not fit into a command line.
compressed() { scontrol show hostlist "$1" 2>/dev/null || printf '%s' "$1"; }

# forwarding COMMAND...: run it, forwarding USR1 that only the batch script gets (--signal=B:USR1@300) to its tasks.
# SIGTERM, which Slurm sends to script and tasks alike, does not end the script before the tasks have saved.
forwarding() {
    local pid=
    trap 'kill -USR1 "${pid:-${!-}}" 2>/dev/null' USR1  # $!: the signal may come before pid is set
    trap 'say "SIGTERM: waiting for the tasks to save"' TERM
    "$@" &
    pid=$!
    wait_through_signals "$pid"
}

# wait_through_signals PID: wait for it and return its code. The caller's traps for USR1 and TERM are removed afterwards.
# A signal must not interrupt `wait`: bash 5.2 then loses the code of a process that ends at the same time. If the job's
# processes write its code to the file MEGATRON_JOB_END, that code counts, and not that of PID, an srun, which is the highest
# of all tasks, also of lost ones that were replaced. SRUN_WAIT seconds after the file PID ends those that still run.
wait_through_signals() {
    local code=0 end=${MEGATRON_JOB_END:-} since='' stopped='' ended
    while [[ -d /proc/$1 ]]; do
        sleep 0.2
        [[ -n $end && -e $end && $SRUN_WAIT -gt 0 ]] || continue
        : "${since:=$SECONDS}"
        ((SECONDS - since >= SRUN_WAIT)) || continue
        complain "the job has ended, but tasks still run $SRUN_WAIT s later: they are killed"
        kill -TERM "$1" 2>/dev/null
        since=$SECONDS stopped=1
    done
    wait "$1" || code=$?
    [[ -z $stopped ]] || code=75
    if ended=$(grep -xE '[0-9]+' "$end" 2>/dev/null) && [[ $ended != "$code" ]]; then
        [[ -n $stopped ]] || say "tasks were lost (exit code $code of srun), but the job has ended with exit code $ended"
        code=$ended
    fi
    trap - USR1 TERM
    return "$code"
}

# launch_training FLAGS...: start pretrain_gpt.py with exactly these flags. Returns its exit code.
launch_training() {
    local -a backend=()
    [[ $DEVICE != cpu ]] || backend=(--distributed-backend gloo)
    launch "$CODE/pretrain_gpt.py" ${backend[@]+"${backend[@]}"} "$@"
}

# failing_tasks FOLDER: print the tasks of the launch in FOLDER that failed according to srun, with the names of their
# logs, and the last lines of up to two logs. Signals and errors of a program (1) come before refusals (2) and lost peers
# (75), which they cause on other ranks.
failing_tasks() {
    local host tasks how file shown=0
    [[ -s $1/srun.err ]] || return 0
    while IFS='|' read -r host tasks how; do
        file=$1/task_${tasks%%[-,]*}.err
        if [[ ! -s $file ]]; then
            complain "task(s) $tasks on $host: $how"
            continue
        fi
        complain "task(s) $tasks on $host: $how; $file:"
        if ((shown++ < 2)); then tail -n 15 "$file" >&2; fi
    done < <(sed -n 's/^srun: error: \([^:]*\): tasks\{0,1\} \([0-9,-]*\): \(.*\)$/\1|\2|\3/p' "$1/srun.err" |
        sed 's/^.*exit code 75$/3&/; t; s/^.*exit code 2$/2&/; t; s/^.*exit code.*/1&/; t; s/^/0/' |
        sort -s -k 1,1.1 | cut -c 2- | head -n 8)
}

# setting NAME PATTERN MEANING: check that the value of NAME matches PATTERN.
setting() {
    [[ ${!1} =~ ^($2)$ ]] || { complain "$1=${!1} is unknown: $3" && return 2; }
}

# Check the settings, and that the allocation has NODES_NEEDED nodes.
check_settings() {
    local needed=${NODES_NEEDED:-1} nodes name
    for name in PREFLIGHT REQUEUE DRY_RUN; do setting "$name" '0|1' "0 or 1" || return; done
    setting DEVICE 'gpu|cpu' "gpu or cpu" || return
    setting GPU_VISIBILITY 'one|all|none' "one, all or none" || return
    for name in MAX_STARTS TASKS_PER_NODE CPUS_PER_TASK MASTER_PORT; do
        setting "$name" '[1-9][0-9]*' "a number of at least 1" || return
    done
    setting SRUN_WAIT '[0-9]+' "a number of seconds" || return
    setting MAX_RESTARTS '[0-9]+' "a number of restarts, 0 for none" || return
    nodes=$(allocated_nodes)
    if [[ ! $needed =~ ^[1-9][0-9]*$ ]] || ((needed > nodes)); then
        complain "NODES_NEEDED=$needed, but the job has $nodes node(s): a number from 1 to $nodes, or sbatch -N for more"
        return 2
    fi
    needed=$(needed_nodes)
    [[ -n ${MIN_NODES:-} ]] || return 0
    [[ $MIN_NODES =~ ^[1-9][0-9]*$ ]] && ((MIN_NODES <= needed && MAX_RESTARTS > 0)) && return 0
    complain "MIN_NODES=$MIN_NODES, but the job trains on $needed node(s) with MAX_RESTARTS=$MAX_RESTARTS: a number from 1 to" \
        "$needed, and MAX_RESTARTS of at least 1"
    return 2
}

# Print the number of nodes to train on.
needed_nodes() { printf '%s' "${NODES_NEEDED:-$(allocated_nodes)}"; }

# start_flags FLAGS...: set TRAIN_FLAGS to all flags of the training: recipe, data, checkpoints, then FLAGS, which override.
start_flags() {
    TRAIN_FLAGS=()
    if [[ -n ${PRESET+set} ]]; then
        [[ -z $PRESET ]] || TRAIN_FLAGS+=(--preset "$PRESET")
    elif [[ $RECIPE == paper ]]; then
        # Ranks in Megatron's order on devices 0, 1, ..., as in the paper's scripts.
        TRAIN_FLAGS+=(--preset "$MODEL" --fp16 --rank-order tp-dp-pp --device-order "0,1,2,3,4,5,6,7")
        TRAIN_FLAGS+=("${PAPER_FLAGS[@]}")
    elif [[ $RECIPE == frontier ]]; then
        TRAIN_FLAGS+=(--preset "$MODEL-frontier")
    else
        complain "RECIPE=$RECIPE is unknown: frontier or paper"
        return 2
    fi
    local lengths="--train-iters --train-samples --train-tokens" save load repeated
    has_flag "$lengths" "$@" || [[ -n ${PRESET+set} ]] || TRAIN_FLAGS+=(--train-tokens "${TRAIN_TOKENS:-$MODEL_TOKENS}")
    data_flags "$@" || return
    save=$(flag_value --save "$@")
    SAVE=${save:-$RUN/checkpoints}
    TRAIN_FLAGS+=(--save "$SAVE" --load "$SAVE" --save-interval-minutes 20 --async-save --keep-last 3)
    TRAIN_FLAGS+=(--log-interval 1 --eval-interval 500 --eval-iters 10)
    repeated="--finetune --reset-iteration --load-tag --no-load-optim"
    load=$(flag_value --load "$@")
    load=${load:-$SAVE}
    if has_flag "$repeated" "$@" || [[ $(realpath -ms "$load") != "$(realpath -ms "$SAVE")" ]]; then
        if [[ $REQUEUE == 1 ]]; then
            complain "with REQUEUE=1 every start must resume from --save: submit once with REQUEUE=0 and --load," \
                "--load-tag, --finetune, --reset-iteration or --no-load-optim, then with REQUEUE=1 and without them"
            return 2
        fi
        say "without restarts within the job, which would load from ${load} again"
    else
        restart_flags "$@" || return
    fi
    [[ $REQUEUE == 0 ]] || TRAIN_FLAGS+=(--requeue)
    TRAIN_FLAGS+=("$@")
}

# restart_flags FLAGS...: add the flags of restarts within the job, which FLAGS override. Sets RESTARTS.
restart_flags() {
    local given
    if has_flag --spare-ranks "$@"; then
        complain "--spare-ranks follows from the number of good nodes and NODES_NEEDED: leave it out"
        return 2
    fi
    given=$(flag_value --max-restarts "$@")
    RESTARTS=${given:-$MAX_RESTARTS}
    if [[ ! $RESTARTS =~ ^[0-9]+$ ]]; then RESTARTS=0; fi # check_flags reports it
    ((RESTARTS)) || return 0
    TRAIN_FLAGS+=(--max-restarts "$RESTARTS" --non-persistent-save-interval auto)
    [[ -z ${MIN_NODES:-} ]] || TRAIN_FLAGS+=(--min-ranks "$((MIN_NODES * TASKS_PER_NODE))")
}

# data_flags FLAGS...: add the data and the tokenizer of site.env to TRAIN_FLAGS, unless FLAGS name others.
data_flags() {
    if has_flag "--mock-data --data-path --data-file-list --train-data-path" "$@"; then return 0; fi
    if [[ -z $SITE_DATA ]]; then
        complain "no training data: set SITE_DATA in site.env, or give --data-path, or --mock-data for synthetic tokens"
        return 2
    fi
    TRAIN_FLAGS+=(--data-path "$SITE_DATA")
    if [[ -n $SITE_VOCAB ]] && ! has_flag --tokenizer-type "$@"; then
        TRAIN_FLAGS+=(--tokenizer-type GPT2BPETokenizer --vocab-file "$SITE_VOCAB" --merge-file "$SITE_MERGES")
    fi
}

# Print the iteration of the newest checkpoint in SAVE; 0 if there is none.
reached() { cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

# Print the number of consecutive starts of this job from the current newest checkpoint.
fruitless_starts() {
    cat "$JOB_LOGS/starts" 2>/dev/null | awk -v now="$(reached)" '{ n = $2 == now ? n + 1 : 0 } END { print n + 0 }'
}

# Record this start. Returns 3 if the job has started MAX_STARTS times from one checkpoint: another start would not help.
note_start() {
    [[ $DRY_RUN != 1 ]] || return 0
    mkdir -p "$LOGS" || return 2
    if (($(fruitless_starts) >= MAX_STARTS)); then
        complain "started $MAX_STARTS times from iteration $(reached) without a new checkpoint: it is not started" \
            "again. What the last start wrote is in $JOB_LOGS"
        return 3
    fi
    echo "$RESTART $(reached)" >>"$JOB_LOGS/starts"
    say "start $RESTART from iteration $(reached) on $(allocated_nodes) node(s) ${SLURM_JOB_NODELIST:-}, logs in $LOGS"
}

# Check the flags, the files and folders that they name, and the placement in one process, as all ranks would before the
# first step: mistakes cost seconds of one node, not minutes of all. Sets CHECKED, unless no Python is there yet.
check_flags() {
    local python=$PYTHON world
    world=$(($(needed_nodes) * TASKS_PER_NODE))
    local command=("$python" "$CODE/pretrain_gpt.py" "${TRAIN_FLAGS[@]}" --complete --world-size "$world" --print-config)
    [[ -x $python || $DRY_RUN == 1 ]] || return 0 # only the packed environment exists, which is not unpacked yet
    CHECKED=1
    show "${command[@]}"
    if [[ $DRY_RUN != 1 ]]; then
        "${command[@]}" >"$LOGS/config.txt"
    elif [[ -x $python ]]; then
        "${command[@]}" >/dev/null
    else
        say "not checked: flags of the training (there is no $python)"
    fi
}

# cause CODE FOLDER: print CODE, the exit code of the launch in FOLDER, or 1 if a task ended with an error of the program
# (1) and none by a signal. Consequences on other ranks have higher codes, as if a rank had been lost or a setting were
# wrong, but another start would hit the same error.
cause() {
    local ends
    ends=$(sed -n 's/^srun: error: [^:]*: tasks\{0,1\} [0-9,-]*: //p' "$2/srun.err" 2>/dev/null)
    if grep -qx 'Exited with exit code 1' <<<"$ends" && ! grep -qv '^Exited with exit code' <<<"$ends"; then
        echo 1
    else
        echo "$1"
    fi
}

# left_to_slurm: test, and report, whether the job is already ending or requeued for a reason other than its time limit.
left_to_slurm() {
    local state
    state=$(squeue -h -j "$JOB" -o '%T %r' 2>/dev/null)
    [[ -n $state && $state != RUNNING* && $state != *TimeLimit* ]] || return
    say "left to Slurm, which has it as ${state%% *}: requeued by the program, or cancelled"
}

# requeue_lost CODE: requeue the job after a lost rank (75, or a task that a signal ended), unless it was cancelled or this
# happened MAX_STARTS times at the same checkpoint. After a lost node Slurm itself requeues a job without --no-kill.
requeue_lost() {
    (($1 == 75 || $1 > 128)) && [[ $REQUEUE == 1 && -n ${SLURM_JOB_ID:-} ]] || return 0
    ! left_to_slurm || return 0
    try_again "back into the queue, to resume from iteration $(reached)"
}

# try_again MESSAGE: requeue the job, unless it started MAX_STARTS times from one checkpoint: it would not start again.
try_again() {
    if (($(fruitless_starts) >= MAX_STARTS)); then
        complain "ended $MAX_STARTS times after iteration $(reached) without a new checkpoint: not put back into" \
            "the queue"
    else
        say "$1"
        put_back || :
    fi
}

# put_back: requeue the job. Slurm then sends SIGTERM to all processes of this script, sometimes before scontrol has its
# answer. They ignore it from here on, otherwise a requeued job would be reported as lost.
put_back() {
    trap '' TERM
    run scontrol requeue "$JOB" || { complain "scontrol requeue failed: submit the job again" && return 1; }
}

# requeue_without FILE: requeue the job, excluding the hosts in FILE. A job's list of excluded nodes can be changed only
# while it is pending, and requeueing ends this script: the change has to be made in between, within KillWait seconds.
requeue_without() {
    [[ $REQUEUE == 1 && -n ${SLURM_JOB_ID:-} ]] && (($(fruitless_starts) < MAX_STARTS)) || return 0
    local bad before
    before=$(scontrol show job "$JOB" | sed -n 's/.*ExcNodeList=\([^ (][^ ]*\).*/\1/p')
    bad=$(compressed "${before:+$before,}$(paste -s -d , "$1")")
    say "back into the queue, without $bad"
    put_back || return 0
    for _ in {1..40}; do
        scontrol update JobId="$JOB" ExcNodeList="$bad" 2>/dev/null && return 0
        sleep 0.25
    done
    complain "scontrol could not exclude $bad: the job may get these nodes again"
}

# Program of guard_script's task on another node: $1 is the node of the batch script, $2 the job, and the other words are
# the command that requeues or ends the job.
# shellcheck disable=SC2016  # for the shell there
GUARD='node=$1 job=$2
shift 2
while sleep "${GUARD_S:-60}"; do
    list=$(squeue -h -j "$job" -t RUNNING -o %N) && [[ -n $list ]] || continue
    nodes=$(scontrol show hostnames "$list") && [[ -n $nodes ]] || continue
    grep -qxF "$node" <<<"$nodes" || "$@" "$job" || ((++refused < 5)) || scancel "$job"
done'

# With --no-kill a job continues after its script died with its node, and at the latest when the training has ended its
# nodes idle until its time limit. A task on another node monitors the script: if the script dies, it requeues the job, or ends it with REQUEUE=0 or after five
# refusals by Slurm. If the node of that task dies, a task on another node takes over.
guard_script() {
    local here=${SLURMD_NODENAME:-$(hostname -s)} host pid ends=(scontrol requeue)
    [[ $REQUEUE == 1 ]] || ends=(scancel)
    trap '' USR1
    for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ $host != "$here" ]] || continue
        # The task outlives its srun only if it sends no output to it.
        srun -N 1 -n 1 --ntasks-per-node=1 -c 1 --overlap -w "$host" --job-name=guard --input=none --output=/dev/null \
            --error=/dev/null bash -c "$GUARD" guard "$here" "$JOB" "${ends[@]}" </dev/null >/dev/null 2>&1 &
        pid=$!
        trap 'kill -TERM "$pid" 2>/dev/null; exit' TERM
        wait "$pid"
    done
    [[ -z ${pid:-} || $(squeue -h -j "$JOB" -o %T 2>/dev/null) != RUNNING* ]] ||
        complain "no other node runs the guard: if $here died, the job would idle until its time limit"
}

# name_run FLAGS...: give trials on mock data, another recipe and each task of an array separate folders, so that no
# training resumes from their checkpoints by accident.
name_run() {
    [[ -z $RUN_NAME_GIVEN ]] || return 0
    [[ $RECIPE != paper || -n ${PRESET+set} ]] || RUN_NAME+=-paper
    ! has_flag --mock-data "$@" || RUN_NAME+=-mock
    RUN_NAME+=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
    RUN=$SITE_RUNS/$RUN_NAME
    JOB_LOGS=$RUN/logs/$JOB
}

# train_job FLAGS...: run the whole job. Ends the script.
train_job() {
    local code=0 TRAIN_FLAGS SAVE CHECKED='' guard='' nodes spares
    name_run "$@"
    LOGS=$JOB_LOGS/$RESTART # not settings of a whole job, but the user's shell may export these names
    unset NODES HOSTS MASTER_ADDR
    check_settings || exit
    start_flags "$@" || exit
    note_start || exit
    # A dry run shows the whole job, and ends with the code of the first failed check.
    check_flags || { code=$? && [[ $DRY_RUN == 1 ]]; } || exit "$code"
    if [[ $DRY_RUN != 1 ]] && (($(allocated_nodes) > 1)); then
        guard_script &
        guard=$!
    fi
    prepare_environment || { code=$? && [[ $DRY_RUN == 1 ]]; } || exit "$code"
    [[ -n $CHECKED ]] || check_flags || exit
    if [[ $PREFLIGHT == 1 ]]; then run_preflight || exit; fi
    nodes=$(needed_nodes)
    if ((RESTARTS)); then
        spares=$(($(if [[ -n $GOOD_HOSTS ]]; then grep -c . "$GOOD_HOSTS"; else allocated_nodes; fi) - nodes))
        ((spares == 0)) || TRAIN_FLAGS+=(--spare-ranks "$((spares * TASKS_PER_NODE))")
        nodes=$((nodes + spares))
    fi
    [[ $CODE != "$MEGATRON_ROOT" ]] || [[ $DEVICE == cpu ]] ||
        TRAIN_FLAGS=(--distributed-timeout-minutes 30 "${TRAIN_FLAGS[@]}") # slow to start from a shared file system
    NODES=$nodes launch_training "${TRAIN_FLAGS[@]}" || code=$?
    [[ $DRY_RUN != 1 ]] || exit "$code"
    [[ -z $guard ]] || kill -TERM "$guard" 2>/dev/null
    ((code == 0)) || code=$(cause "$code" "$LOGS")
    say "training ended with exit code $code at iteration $(reached)"
    if ((code)); then
        failing_tasks "$LOGS"
        requeue_lost "$code"
    fi
    exit "$code"
}
