# shellcheck shell=bash
# The body of weak_scaling.sh, strong_scaling.sh and sweep_tp_pp_mbs.sh, which set KINDS and source it. EXPERIMENTS.md
# explains their use. Not run on Frontier yet.
#
#   weak_scaling.sh --dry-run          show points with layouts, times and node-hours; submits nothing, runs anywhere
#   sbatch -N 128 weak_scaling.sh      all points in one allocation, side by side if they fit
#   SUBMIT=one weak_scaling.sh         the same, with the number of nodes of the largest point
#   SUBMIT=each weak_scaling.sh        a separate job for each point: fewer node-hours
#   LAUNCHER=local weak_scaling.sh     on this machine, without Slurm
# Arguments go to tools/run_experiment.py; flags of pretrain_gpt.py come after --.
#
# Settings, from the environment:
#   MODEL        22b, 175b, 1t, or any preset           RECIPE      paper or frontier
#   VALUES       values of the size that varies, such as "1 2 4": replicas in weak and strong scaling
#   BATCH        sequences per replica for weak, micro-batches per stage for pp-bubble, otherwise sequences of every
#                point; without effect on the experiment batch, which varies them
#   ITERATIONS   measured steps of each point           WARM_UP     steps before them
#   OUT          folder of results, with a subfolder for each experiment
#   SIDE_BY_SIDE 1: points share the allocation on disjoint nodes; 0: one after another
#   RETRY_FAILED 1: failed points run again             POINT_LIMIT seconds that a point may take
#   TIME         wall time of the jobs of SUBMIT, as for sbatch -t; default: the longest that the machine allows
#   REQUEUE      1: requeue when time runs out with points left
#   PYTHON       interpreter for planning and, with LAUNCHER=local, for training

: "${MODEL:=175b}" "${RECIPE:=paper}" "${ITERATIONS:=3}" "${WARM_UP:=2}" "${SIDE_BY_SIDE:=1}" "${LAUNCHER:=slurm}"
: "${SUBMIT:=}" "${RETRY_FAILED:=0}" "${REQUEUE:=1}"
SCRIPT=$MEGATRON_ROOT/examples/frontier/$SCRIPT_NAME
# shellcheck source=examples/frontier/allocation.sh
source "$MEGATRON_ROOT/examples/frontier/allocation.sh" || exit 2

# experiment KIND ARGUMENTS...: run tools/run_experiment.py with the settings of the environment.
experiment() {
    local kind=$1 recipe=
    shift
    case $MODEL in 22b | 175b | 1t) recipe=-$RECIPE ;; esac
    local flags=(--preset "$MODEL" --recipe "$RECIPE" --iterations "$ITERATIONS" --warm-up "$WARM_UP")
    flags+=(--launcher "$LAUNCHER" --out "$(results)/$kind-$MODEL$recipe")
    [[ -z ${VALUES:-} ]] || flags+=(--values "$VALUES")
    [[ -z ${BATCH:-} || $kind == batch ]] || flags+=(--batch "$BATCH")
    [[ -z ${POINT_LIMIT:-} ]] || flags+=(--limit "$POINT_LIMIT")
    [[ -z ${SITE_CLUSTER:-} ]] || flags+=(--cluster "$SITE_CLUSTER")
    [[ -z ${TASKS_PER_NODE:-} ]] || flags+=(--tasks-per-node "$TASKS_PER_NODE")
    [[ $SIDE_BY_SIDE == 1 ]] || flags+=(--one-at-a-time)
    [[ $RETRY_FAILED != 1 ]] || flags+=(--retry-failed)
    "$PLANNER" "$MEGATRON_ROOT/tools/run_experiment.py" "$kind" "${flags[@]}" "$@"
}

# each_kind ARGUMENTS...: run every experiment of KINDS; returns the worst exit code.
each_kind() {
    local kind code=0 worst=0
    for kind in $KINDS; do
        [[ -z ${STOP_FILE:-} || ! -e $STOP_FILE ]] || break # a signal: the job is about to end
        code=0
        experiment "$kind" "$@" || code=$?
        ((code != 2)) || return 2
        ((code <= worst)) || worst=$code
    done
    return "$worst"
}

# submit_one ARGUMENTS...: submit one job with the nodes of the largest point.
submit_one() {
    local nodes most=1 kind
    for kind in $KINDS; do
        nodes=$(experiment "$kind" --print-nodes "$@") || return
        ((nodes <= most)) || most=$nodes
    done
    SUBMIT='' sbatch -N "$most" -t "$(longest_time "$most")" "$SCRIPT" "$@"
}

# submit_each ARGUMENTS...: submit a job for each point that is not done, with its number of nodes, in a partition that
# allows its time.
submit_each() {
    local kind name nodes time partition points options
    for kind in $KINDS; do
        points=$(experiment "$kind" --list "$@") || return
        while read -r name nodes time partition; do
            [[ -n $name ]] || continue
            options=(-N "$nodes" -t "${TIME:-$time}")
            [[ $partition == - ]] || options+=(-p "$partition")
            SUBMIT='' KINDS=$kind sbatch "${options[@]}" "$SCRIPT" --points "$name" "$@" || return
        done <<<"$points"
    done
}

# longest_time NODES: print TIME, or the longest time that the machine allows a job on NODES nodes.
longest_time() {
    printf '%s' "${TIME:-$(experiment "${KINDS%% *}" --print-limit "$1")}"
}

# Print the number of points that are done, of all experiments in the folder of results.
progress() { grep -rls --include=result.json '"status": "done"' "$(results)" | wc -l; }

main() {
    PLANNER=$(planning_python) || return
    local argument
    for argument; do
        case $argument in
            --dry-run) each_kind "$@"; return ;;
            -h | --help) sed -n '2,/^$/{s/^# \{0,1\}//;p}' "$MEGATRON_ROOT/examples/frontier/experiment.sh"; return ;;
            --) break ;;
        esac
    done
    case $SUBMIT:$LAUNCHER in
        one:*) submit_one "$@" ;;
        each:*) submit_each "$@" ;;
        :local) each_kind "$@" ;;
        :slurm)
            if [[ -z ${SLURM_JOB_ID:-} ]]; then
                echo "$SCRIPT_NAME: not inside an allocation. --dry-run shows the points; sbatch -N NODES $SCRIPT," \
                    "SUBMIT=one or SUBMIT=each submits them; LAUNCHER=local runs them on this machine." >&2
                return 2
            fi
            in_allocation each_kind "$@"
            ;;
        *)
            echo "SUBMIT=$SUBMIT LAUNCHER=$LAUNCHER: SUBMIT is empty, one or each; LAUNCHER is slurm or local" >&2
            return 2
            ;;
    esac
}
