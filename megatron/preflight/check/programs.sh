# shellcheck shell=bash
# Part of prelude.sh: what stands for programs in a script that is followed. Tools that only read are run; programs that a
# job would start are noted, and Slurm's commands answer as in a job.
# shellcheck disable=SC2154 # variables of prelude.sh

# NAME WORD...: what stands for a program. `args` may be read with copies of files that the script wrote.
__pf_external() {
    local name=${1##*/} arg
    local -a args=()
    case $name in
        srun) shift; __pf_srun "$@" ;;
        python | python[23]* | pypy* | torchrun | deepspeed | mpirun | mpiexec) __pf_program "$@" ;;
        bash | sh | dash) shift; __pf_bash "$@" ;;
        ssh) shift; __pf_ssh "$@" ;;
        env | nohup | setsid | timeout | nice | ionice | stdbuf | numactl | taskset | time | xvfb-run)
            shift; __pf_wrapper "$name" "$@" ;;
        module | ml) shift; __pf_record module "$@" ;;
        lmod | modulecmd) shift 2; __pf_record module "$@" ;; # what the sites' own function module calls
        sbcast) __pf_record sbcast "$@" ;;
        scontrol) shift; __pf_scontrol "$@" ;;
        squeue) __pf_squeue "$@" ;;
        sinfo | sacct | sacctmgr | scancel | sbatch | salloc | sstat | rocm-smi | amd-smi | rocminfo | nvidia-smi)
            __pf_record skipped "$@" ;;
        hostname) __pf_hostname "$@" ;;
        getent) printf '%s %s\n' "$__PF_ADDRESS" "${*: -1}" ;;
        nproc) printf '%s\n' "${SLURM_CPUS_ON_NODE:-1}" ;;
        sleep | wait4path | sync | true) ;;
        which) for arg in "${@:2}"; do [[ $arg == -* ]] || printf '/usr/bin/%s\n' "$arg"; done ;;
        mkdir | touch) __pf_make "$@" ;;
        mktemp) __pf_mktemp "$@" ;;
        cp) shift; __pf_cp "$@" ;;
        sed) shift; __pf_sed "$@" ;;
        tee)
            for arg in "${@:2}"; do
                if [[ $arg == -* ]]; then args+=("$arg"); else args+=("$(__pf_out "$arg")"); fi
            done
            "$__pf_bin/.tee" ${args[@]+"${args[@]}"}
            ;;
        *) __pf_tool "$@" ;;
    esac
}

# A Python program is noted. Of our own measurement the answer is that all nodes are good.
__pf_program() {
    local word folder='' measures=''
    __pf_record python "$@"
    for word; do
        [[ $word == measure ]] && measures=yes
        [[ $folder == next ]] && folder=$word
        case $word in --out) folder=next ;; --out=*) folder=${word#*=} ;; esac
    done
    if [[ -n $measures && $* == *preflight.py* && -n $folder && $folder != next ]]; then
        "$__pf_bin/cat" "$__pf_scratch/hosts" > "$(__pf_out "$folder/good_hosts")"
    fi
}

# A tool that only reads, or a record that something was not run.
__pf_tool() {
    local name=${1##*/} arg why=
    local -a args=()
    case $name in
        awk | gawk | mawk) [[ $* == *system* || $* == *'>'* || $* == *'|'* || $* == *getline* || $* == *-i* ]] && why=yes ;;
        sort | shuf) [[ " $*" == *' -'*o* || $* == *-T* || $* == *compress* ]] && why=yes ;;
        uniq) [[ ${*:2} == *[!\ -]*' '[!-]* ]] && why=yes ;;
        date) [[ $* == *' -s'* || $* == *--set* ]] && why=yes ;;
        find) [[ $* == *-delete* || $* == *-exec* || $* == *-ok* || $* == *-fprint* || $* == *-fls* ]] && why=yes ;;
        .*) why=yes ;;
    esac
    if [[ -n $why || ! -x $__pf_bin/$name ]]; then
        if [[ $1 == */* ]]; then __pf_run_file_apart "$@"; else __pf_record skipped "$@"; fi
        return 0
    fi
    case $name in # names are only names to them
        basename | dirname | realpath | readlink | find | date | seq | expr | id | uname | printenv)
            "$__pf_bin/$name" "${@:2}"
            return
            ;;
    esac
    for arg in "${@:2}"; do
        if [[ $arg != -* && -f $__pf_scratch/files/${arg#/} ]]; then arg=$__pf_scratch/files/${arg#/}
        elif [[ $arg != -* && -f $__pf_scratch/files$PWD/$arg ]]; then arg=$__pf_scratch/files$PWD/$arg; fi
        args+=("$arg")
    done
    "$__pf_bin/$name" ${args[@]+"${args[@]}"}
}

# A script is a process of its own: neither its variables nor its end are the caller's.
__pf_run_file_apart() (
    set +eu
    __pf_run_file "$@"
)

__pf_bash() (
    local text='' has_text=''
    set +eu
    while [[ ${1-} == [-+]* ]]; do
        case $1 in
            -- | -) shift; break ;;
            --init-file | --rcfile | [-+]o | [-+]O) shift ;;
            --*) ;;
            -*c*) has_text=yes ;;
        esac
        shift
    done
    if [[ -n $has_text ]]; then
        text=${1-}
        shift
        (($#)) && shift # $0
        __pf_run_text "$text" "$@"
    elif (($#)); then
        if [[ -f $(__pf_in "$1") ]]; then
            text=$(__pf_source "$1")
            shift
            builtin source "$text"
        else
            __pf_record missing "$1"
        fi
    else
        text=$("$__pf_bin/cat")
        __pf_run_text "$text"
    fi
)

__pf_ssh() (
    set +eu
    while [[ ${1-} == -* ]]; do
        case $1 in -[bcDEeFIiJLlmOopQRSWw]) shift ;; esac
        shift
    done
    shift || :
    (($#)) && __pf_run_text "$*"
)

# Programs that start another one: NAME WORD...
__pf_wrapper() (
    local name=$1 plain=0
    shift
    [[ $name == timeout || $name == taskset ]] && plain=1
    while (($#)); do
        case $1 in
            --) shift; break ;;
            -u | -C | -S | -n | -c | -k | -s | -i | -o | -e)
                case $name$1 in env-i | timeout-i | taskset-c | setsid-c) ;; *) shift ;; esac ;;
            -*) ;;
            [A-Za-z_]*=*)
                [[ $name == env ]] || break
                # shellcheck disable=SC2163 # NAME=value
                export "$1"
                ;;
            *)
                ((plain-- > 0)) || break
                ;;
        esac
        shift || :
    done
    if (($#)); then __pf_external "$@"; elif [[ $name == env ]]; then "$__pf_bin/.env"; fi
)

# ---- Slurm

__pf_srun() {
    local at nodes tasks per_node step=$BASHPID.$((__pf_srun_count = ${__pf_srun_count:-0} + 1))
    __PF_STEP=$step __pf_record srun "$@"
    read -r at nodes tasks per_node < <("$__pf_python" -I -S "$__pf_here/slurm_options.py" "$@")
    ((at < 0 || at >= $#)) || (
        set +eu
        export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NUM_NODES=$nodes
        export SLURM_NTASKS=$tasks SLURM_STEP_NUM_TASKS=$tasks SLURM_NTASKS_PER_NODE=$per_node
        export SLURM_STEP_TASKS_PER_NODE="$per_node(x$nodes)" __PF_STEP=$step
        __pf_run "${@:at + 1}"
    )
}

__pf_scontrol() {
    case "${1-} ${2-}" in
        'show hostname' | 'show hostnames' | 'show host')
            if (($# < 3)) || [[ $3 == "$SLURM_JOB_NODELIST" ]]; then "$__pf_bin/cat" "$__pf_scratch/hosts"
            else printf '%s\n' "$3"; fi
            ;;
        'show job' | 'show jobs' | 'show jobid') printf 'JobId=%s TimeLimit=%s Requeue=1\n' "$SLURM_JOB_ID" "$__PF_TIME" ;;
        'show hostlist') __pf_hostlist "$3" ;;
        *) __pf_record skipped scontrol "$@" ;;
    esac
}

# a1,a2,...: in Slurm's short form where they are the first nodes of the job.
__pf_hostlist() {
    local -a hosts=()
    local IFS=, last name
    read -ra hosts <<< "$1"
    last=$(printf '%05d' "${#hosts[@]}") name=${SLURMD_NODENAME%00001}
    if ((${#hosts[@]} > 1)) && [[ ${hosts[0]} == "$SLURMD_NODENAME" && ${hosts[${#hosts[@]} - 1]} == "$name$last" ]]; then
        printf '%s\n' "${name}[00001-$last]"
    else
        printf '%s\n' "$1"
    fi
}

__pf_squeue() {
    case "$*" in
        *%L* | *TimeLeft*) printf '%s\n' "$__PF_TIME" ;;
        *%T* | *State*) printf 'RUNNING\n' ;;
        *) __pf_record skipped "$@" ;;
    esac
}

__pf_hostname() {
    case "${2-}" in
        -[iI]* | --ip-address | --all-ip-addresses) printf '%s\n' "$__PF_ADDRESS" ;;
        -* | '') printf '%s\n' "$SLURMD_NODENAME" ;;
        *) __pf_record skipped "$@" ;;
    esac
}

# ---- files that programs make

__pf_make() {
    local arg mapped
    for arg in "${@:2}"; do
        [[ $arg == -* ]] && continue
        mapped=$(__pf_out "$arg")
        if [[ ${1##*/} == mkdir ]]; then "$__pf_bin/.mkdir" -p -- "$mapped"; else : >> "$mapped"; fi
    done
    return 0
}

__pf_mktemp() {
    local mapped=$__pf_scratch/files/tmp/tmp.$BASHPID.$RANDOM
    "$__pf_bin/.mkdir" -p -- "${mapped%/*}"
    if [[ " $*" == *' -d'* || $* == *--directory* ]]; then "$__pf_bin/.mkdir" -- "$mapped"; else : > "$mapped"; fi
    printf '%s\n' "$mapped"
}

__pf_cp() {
    local arg to
    local -a names=()
    for arg in "$@"; do [[ $arg == -* ]] || names+=("$arg"); done
    if ((${#names[@]} == 2)) && [[ -f $(__pf_in "${names[0]}") ]]; then
        to=${names[1]}
        [[ -d $to || $to == */ ]] && to=$to/${names[0]##*/}
        "$__pf_bin/head" -c 1000000 -- "$(__pf_in "${names[0]}")" > "$(__pf_out "$to")"
    else
        __pf_record skipped cp "$@"
    fi
}

__pf_sed() {
    local arg in_place='' last=${*: -1} mapped
    local -a args=()
    for arg in "$@"; do
        case $arg in --in-place* | -i* | -[nErsz]*i*) in_place=yes ;; esac
        if [[ $arg != -* && -f $__pf_scratch/files$PWD/$arg ]]; then arg=$__pf_scratch/files$PWD/$arg
        elif [[ $arg == /* && -f $__pf_scratch/files$arg ]]; then arg=$__pf_scratch/files$arg; fi
        args+=("$arg")
    done
    if [[ -n $in_place ]]; then
        if [[ ! -f $(__pf_in "$last") ]]; then __pf_record skipped sed "$@"; return 0; fi
        mapped=$(__pf_out "$last")
        [[ -e $mapped ]] || "$__pf_bin/head" -c 1000000 -- "$last" > "$mapped"
        args[${#args[@]} - 1]=$mapped
        for arg in "${args[@]::${#args[@]} - 1}"; do
            if [[ -e $arg ]]; then __pf_record skipped sed "$@"; return 0; fi
        done
    fi
    "$__pf_bin/sed" --sandbox "${args[@]}"
}
