# shellcheck shell=bash
# Functions of jobs that run several trainings; experiment.sh and tune.sbatch source this file. Sourcing defines
# functions and starts nothing. It needs MEGATRON_ROOT, and REQUEUE as in job.sh. Not run on Frontier yet.

# Print the Python for planning: PYTHON, or that of the site or of this clone, or any python3.
planning_python() {
    local candidate
    for candidate in "${PYTHON:-}" "${SITE_VENV:+$SITE_VENV/bin/python}" "$MEGATRON_ROOT/.venv-frontier/bin/python" \
        "$MEGATRON_ROOT/.venv/bin/python" python3; do
        if command -v "$candidate" >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    echo "no Python: set PYTHON" >&2
    return 2
}

# Print the folder of all results: OUT, or SITE_RUNS of site.env.
results() { printf '%s' "${OUT:-${SITE_RUNS:-$MEGATRON_ROOT/runs}}"; }

# in_allocation PROGRAM WORDS...: prepare the environment and test the nodes once for all trainings, then run PROGRAM
# --hosts-file FILE WORDS... with the good nodes in FILE. Exit codes 3 and 4 of PROGRAM mean that time or nodes ran out
# with work left: the job is requeued unless it was cancelled, at most MAX_STARTS times without progress, which the
# caller's function `progress` prints as a number. NO_KILL=1: the job was submitted with --no-kill, so that it survives
# the loss of nodes.
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

# Distribute the environment, and find the good nodes. If this fails because a node died, the job is requeued.
make_ready() {
    local code=0
    prepare_environment && { [[ $PREFLIGHT != 1 ]] || run_preflight; } || code=$?
    if ((code)) && [[ $REQUEUE == 1 ]] && lost_nodes && ! left_to_slurm; then
        try_again "a node was lost: back into the queue"
    fi
    return "$code"
}

# Test whether this job has fewer nodes than at its start.
lost_nodes() {
    local now
    now=$(squeue -h -j "$JOB" -o %D 2>/dev/null)
    [[ $now =~ ^[0-9]+$ ]] && ((now < $(allocated_nodes)))
}

# run_on_good_hosts PROGRAM WORDS...: run it, and requeue the job if PROGRAM ends with work left.
run_on_good_hosts() {
    local program=$1 hosts=$LOGS/hosts code=0
    shift
    # Each training sources job.sh again, which would otherwise set other values.
    export MEGATRON_ROOT POINT_PYTHON=$PYTHON POINT_CODE=$CODE DEVICE CPUS_PER_TASK GPU_VISIBILITY
    STOP_FILE=$LOGS/stop
    if [[ -n $GOOD_HOSTS ]]; then
        cp "$GOOD_HOSTS" "$hosts"
    else
        scontrol show hostnames "$SLURM_JOB_NODELIST" >"$hosts"
    fi
    # No exec: this shell receives Slurm's signals and forwards them.
    forwarded "$program" --hosts-file "$hosts" "$@" || code=$?
    if ((code == 3 || code == 4)) && [[ $REQUEUE == 1 ]] && ! left_to_slurm; then
        try_again "stopped with work left: back into the queue"
    fi
    return "$code"
}

# forwarded COMMAND...: run it in the background, forwarding USR1 and TERM to the program that it is running. STOP_FILE
# exists after a signal.
forwarded() {
    local pid=
    trap 'touch "$STOP_FILE"; pkill -USR1 -P "${pid:-${!-}}" 2>/dev/null' USR1
    trap 'touch "$STOP_FILE"; pkill -TERM -P "${pid:-${!-}}" 2>/dev/null' TERM
    # Slurm signals all processes of a script at a job's end. The shell in between would die of the signal, this shell
    # would take that for the end of the program, and the program would be killed before its last output.
    (trap : USR1 TERM && "$@") &
    pid=$!
    wait_through_signals "$pid"
}
