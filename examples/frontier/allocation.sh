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
# with the good nodes in FILE. Exit codes 3 and 4 of PROGRAM are that time ran out with work left: the job goes back into
# the queue unless somebody ended it, at most MAX_STARTS times without progress, which the caller's function `progress`
# prints as a number.
in_allocation() {
    # shellcheck source=examples/frontier/job.sh
    source "$MEGATRON_ROOT/examples/frontier/job.sh" || return 2
    reached() { progress; }
    local program=$1 hosts=$LOGS/hosts code=0
    shift
    check_settings || return
    note_start || return
    mkdir -p "$LOGS" && prepare_environment || return
    if [[ $PREFLIGHT == 1 ]]; then run_preflight || return; fi
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

# forwarded COMMAND...: in the background, with USR1 and TERM handed on to the program that it runs at the time. STOP_FILE
# is there once one came.
forwarded() {
    local pid trapped
    # Slurm signals all processes of a script at a job's end. The shell between would die of it, this one would take that
    # for the end, and the program would be killed at its last words.
    (trap : USR1 TERM && "$@") &
    pid=$!
    trap 'trapped=1; touch "$STOP_FILE"; pkill -USR1 -P "$pid" 2>/dev/null' USR1
    trap 'trapped=1; touch "$STOP_FILE"; pkill -TERM -P "$pid" 2>/dev/null' TERM
    wait_through_signals "$pid"
}
