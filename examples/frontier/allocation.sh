# shellcheck shell=bash
# What jobs that run several trainings have in common: experiment.sh and tune.sbatch source it. Sourcing defines functions
# and starts nothing. It needs MEGATRON_ROOT, and REQUEUE as job.sh has it. Not run on Frontier yet.

# Which Python plans: the one given, the site's, this clone's, or any.
planning_python() {
    local candidate
    for candidate in "${PYTHON:-}" "${SITE_VENV:-}/bin/python" "$MEGATRON_ROOT/.venv-frontier/bin/python" \
        "$MEGATRON_ROOT/.venv/bin/python" python3; do
        if command -v "$candidate" >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    echo "no Python: set PYTHON" >&2
    return 2
}

# Folder of all results: OUT, or where site.env has them.
results() { printf '%s' "${OUT:-${SITE_RUNS:-$MEGATRON_ROOT/runs}}"; }

# in_allocation PROGRAM WORDS...: environment and preflight once for all trainings, then PROGRAM --hosts-file FILE WORDS...
# with the good nodes in FILE. Exit codes 3 and 4 of PROGRAM are that time, or nodes, ran out with work left: the job goes
# back into the queue unless somebody ended it, at most MAX_STARTS times without progress, which the caller's function
# `progress` prints as a number. NO_KILL=1: the job was submitted with --no-kill, so that it survives the death of nodes.
in_allocation() {
    # shellcheck source=examples/frontier/job.sh
    source "$MEGATRON_ROOT/examples/frontier/job.sh" || return 2
    reached() { progress; }
    local program=$1 code=0
    shift
    check_settings || return
    note_start || return
    mkdir -p "$LOGS" || return
    local guard=
    if [[ ${NO_KILL:-0} == 1 && $(allocated_nodes) -gt 1 ]]; then
        guard_script &
        guard=$!
    fi
    make_ready || code=$?
    if ((code == 0)); then
        run_on_good_hosts "$program" "$@" || code=$?
    fi
    [[ -z $guard ]] || kill -TERM "$guard" 2>/dev/null
    return "$code"
}

# The environment on the nodes, and which of them are good. A node that dies meanwhile spoils both.
make_ready() {
    local code=0
    prepare_environment && { [[ $PREFLIGHT != 1 ]] || run_preflight; } || code=$?
    if ((code)) && [[ $REQUEUE == 1 ]] && lost_nodes && ! left_to_slurm; then
        say "a node was lost: back into the queue"
        put_back || :
    fi
    return "$code"
}

# Whether this job has fewer nodes than it began with.
lost_nodes() {
    local now
    now=$(squeue -h -j "$SLURM_JOB_ID" -o %D 2>/dev/null)
    [[ $now =~ ^[0-9]+$ ]] && ((now < $(allocated_nodes)))
}

# run_on_good_hosts PROGRAM WORDS...: and put the job back into the queue where PROGRAM ends with work left.
run_on_good_hosts() {
    local program=$1 hosts=$LOGS/hosts code=0
    shift
    # job.sh, sourced again by each training, would choose these anew.
    export MEGATRON_ROOT POINT_PYTHON=$PYTHON POINT_CODE=$CODE DEVICE CPUS_PER_TASK GPU_VISIBILITY
    STOP_FILE=$LOGS/stop
    if [[ -n $GOOD_HOSTS ]]; then
        cp "$GOOD_HOSTS" "$hosts"
    else
        scontrol show hostnames "$SLURM_JOB_NODELIST" >"$hosts"
    fi
    # Not exec: Slurm's signals come to this shell, which hands them on.
    forwarded "$program" --hosts-file "$hosts" "$@" || code=$?
    if ((code == 3 || code == 4)) && [[ $REQUEUE == 1 ]] && ! left_to_slurm; then
        say "stopped with work left: back into the queue"
        put_back || :
    fi
    return "$code"
}

# What a task on another node does for guard_script: $1 is the script's node, $2 and the following words end the job.
# shellcheck disable=SC2016  # for the shell there
GUARD='node=$1
shift
while sleep "${GUARD_S:-60}"; do
    list=$(squeue -h -j "$SLURM_JOB_ID" -t RUNNING -o %N) && [[ -n $list ]] || continue
    nodes=$(scontrol show hostnames "$list") && [[ -n $nodes ]] || continue
    grep -qxF "$node" <<<"$nodes" || "$@" "$SLURM_JOB_ID" || ((++refused < 5)) || scancel "$SLURM_JOB_ID"
done'

# With --no-kill a job whose script died with its node goes on, and all its nodes idle until its time is over. A task on
# another node looks after it: it puts the job back into the queue then, or ends it with REQUEUE=0 or where Slurm refuses
# that five times. When its own node dies, another one takes over.
guard_script() {
    local here=${SLURMD_NODENAME:-$(hostname -s)} host pid ends=(scontrol requeue)
    [[ $REQUEUE == 1 ]] || ends=(scancel)
    trap '' USR1
    for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ $host != "$here" ]] || continue
        # It outlives its srun only if nothing of it goes there.
        srun -N 1 -n 1 --ntasks-per-node=1 -c 1 --overlap -w "$host" --job-name=guard --input=none --output=/dev/null \
            --error=/dev/null bash -c "$GUARD" guard "$here" "${ends[@]}" </dev/null >/dev/null 2>&1 &
        pid=$!
        trap 'kill -TERM "$pid" 2>/dev/null; exit' TERM
        wait "$pid"
    done
    [[ -z ${pid:-} || $(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null) != RUNNING* ]] ||
        complain "no other node runs the guard: should $here die, the job would idle until its time is over"
}

# forwarded COMMAND...: in the background, with USR1 and TERM handed on to the program that it runs at the time. STOP_FILE
# is there once one came.
forwarded() {
    local pid=
    trap 'touch "$STOP_FILE"; pkill -USR1 -P "${pid:-${!-}}" 2>/dev/null' USR1
    trap 'touch "$STOP_FILE"; pkill -TERM -P "${pid:-${!-}}" 2>/dev/null' TERM
    # Slurm signals all processes of a script at a job's end. The shell between would die of it, this one would take that
    # for the end, and the program would be killed at its last words.
    (trap : USR1 TERM && "$@") &
    pid=$!
    wait_through_signals "$pid"
}
