#!/usr/bin/env bash
# A throw-away Slurm cluster of virtual Frontier-like nodes on this machine: real munged, slurmctld and one slurmd per
# node, for what only a scheduler does: options that are taken or refused, devices of tasks, signals before the time
# limit, lost nodes, requeueing. Needs root, unshare and, on Debian,
#     apt-get install slurmctld slurmd slurm-client munge
#
#   slurm_testbed.sh start            start it; returns when all nodes are idle
#   slurm_testbed.sh stop             end it and every job; logs stay in the folder
#   slurm_testbed.sh missing          print what is missing to run it, nothing where it can run
#   slurm_testbed.sh env              print the line that points Slurm's commands at it
#   slurm_testbed.sh lose-node NAME   end everything on a node at once, and tell Slurm that it is down
#   slurm_testbed.sh add-node NAME    bring a lost node back
#   slurm_testbed.sh stop-controller, start-controller
#                                     let the cluster be without its controller for a while
#   slurm_testbed.sh hurry JOB        start a requeued job now; Slurm would hold it for two minutes
#   slurm_testbed.sh slow-task NAME LOCALID PERCENT
#                                     tasks that start there from now on run PERCENT of the time and are stopped otherwise
#   slurm_testbed.sh mend             take back slow-task for tasks that start from now on
#
# TESTBED_DIR (default /tmp/slurm_testbed), TESTBED_NODES (2) and TESTBED_PORT (16817, one port more per node) set where
# it is and how large. A node is a namespace of processes, mounts and host name: its name resolves inside of its jobs,
# and the death of its first process is the death of all of them. Nothing outside of the folder is changed.
# TESTBED_PAPER_NODES (0): so many nodes more that exist in the controller's books only, as nodes that it would have to
# power on first: what asks for them is checked, as by `sbatch --test-only`, and could never start.
#
# Unlike Frontier it has no control groups, so tasks are not bound to cores; no accounting, so every account and quality
# of service is taken; no Slingshot. Its partitions batch and extended have the longest limits there; because Slurm
# cannot tie hours to numbers of nodes within one partition (Frontier has a plug-in for that), each of batch's three
# ranges of nodes is a partition too: batch-2h, batch-6h, batch-12h.
set -euo pipefail

DIR=${TESTBED_DIR:-/tmp/slurm_testbed}
NODES=${TESTBED_NODES:-2}
PORT=${TESTBED_PORT:-16817}
PAPER_NODES=${TESTBED_PAPER_NODES:-0}
DEVICES=8
NEAREST=(4 5 2 3 6 7 0 1)  # device of cores 0-7, 8-15, ...
PROGRAMS=(munged munge slurmctld slurmd sbatch srun scontrol squeue sinfo unshare)

export SLURM_CONF=$DIR/etc/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

fail() { echo "slurm_testbed.sh: $*" >&2; exit 1; }

names() { ((NODES == 0)) || seq -f 'node%02.0f' "$NODES"; }

missing() {
    local program
    [[ $(id -u) -eq 0 ]] || echo "root"
    for program in "${PROGRAMS[@]}"; do
        command -v "$program" >/dev/null || echo "$program"
    done
    unshare --mount --uts --pid --fork true 2>/dev/null || echo "namespaces (unshare is refused)"
}

runs() {  # runs PIDFILE: its process is there and no zombie
    local pid state
    pid=$(cat "$1" 2>/dev/null) || return 1
    state=$(ps -o stat= -p "$pid") && [[ $state != Z* ]]
}

until_true() {  # until_true SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" &>/dev/null; do
        ((SECONDS < end)) || fail "waited too long for $what; logs are in $DIR/log"
        sleep 0.1
    done
}

configure() {
    mkdir -p "$DIR"/{etc,log,run,state,spool,munge,devices,faults}
    chmod 755 "$DIR" "$DIR/munge" "$DIR/run"
    chmod 700 "$DIR/state"
    # Only the daemons of this cluster share the key.
    [[ -s $DIR/etc/munge.key ]] || (umask 077 && head -c 256 /dev/urandom >"$DIR/etc/munge.key")
    : >"$DIR/etc/cgroup.conf"
    slurm_conf >"$SLURM_CONF"
    gres_conf >"$DIR/etc/gres.conf"
    task_prolog >"$DIR/etc/task_prolog"
    chmod 755 "$DIR/etc/task_prolog"
}

slurm_conf() {
    local name number=0
    echo "127.0.0.1 localhost $(hostname -s)" >"$DIR/etc/hosts"
    echo "ClusterName=testbed"
    echo "SlurmctldHost=$(hostname -s)(127.0.0.1)"
    echo "SlurmctldPort=$PORT"
    echo "SlurmUser=root"
    echo "SlurmdUser=root"
    echo "AuthType=auth/munge"
    echo "AuthInfo=socket=$DIR/munge/socket"
    echo "CredType=cred/munge"
    echo "StateSaveLocation=$DIR/state"
    echo "SlurmdSpoolDir=$DIR/spool/%n"
    echo "SlurmctldPidFile=$DIR/run/slurmctld.pid"
    echo "SlurmdPidFile=$DIR/spool/%n/slurmd.pid"
    echo "SlurmctldLogFile=$DIR/log/slurmctld.log"
    echo "SlurmdLogFile=$DIR/log/slurmd.%n.log"
    # Without control groups, which a container may not make: tasks are followed through /proc.
    echo "ProctrackType=proctrack/linuxproc"
    echo "TaskPlugin=task/none"
    echo "TaskProlog=$DIR/etc/task_prolog"
    echo "JobAcctGatherType=jobacct_gather/none"
    echo "AccountingStorageType=accounting_storage/none"
    echo "MpiDefault=none"
    echo "MailProg=/bin/true"
    # Nodes have the size that is written here, not that of this machine.
    echo "SlurmdParameters=config_overrides"
    echo "SelectType=select/cons_tres"
    echo "SelectTypeParameters=CR_Core"
    echo "GresTypes=gpu"
    echo "SchedulerType=sched/backfill"
    echo "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
    # A node is lost when lose-node says so, not when this machine is busy. SIGKILL follows SIGTERM after 60 s. The time
    # limit itself is exact.
    echo "SlurmdTimeout=300"
    echo "MessageTimeout=60"
    echo "KillWait=60"
    echo "OverTimeLimit=0"
    echo "MinJobAge=3600"
    echo "ReturnToService=2"
    echo "JobRequeue=1"
    # What no partition of the job would take is refused at once.
    echo "EnforcePartLimits=ANY"
    # 64 cores in 8 regions of a common L3 cache; the first core of each is the system's, so jobs have 7 in each.
    echo "AllowSpecResourcesUsage=YES"
    echo "NodeName=DEFAULT Boards=1 SocketsPerBoard=8 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=512000" \
        "CpuSpecList=0-1,16-17,32-33,48-49,64-65,80-81,96-97,112-113 Gres=gpu:mi250x:$DEVICES Feature=nvme"
    for name in $(names); do
        number=$((number + 1))
        echo "NodeName=$name NodeAddr=127.0.0.$((100 + number)) Port=$((PORT + number))"
        echo "127.0.0.$((100 + number)) $name" >>"$DIR/etc/hosts"
        mkdir -p "$DIR/spool/$name" "$DIR/mnt/$name/bb/$(id -un)"
    done
    if ((PAPER_NODES)); then
        echo "SuspendProgram=/bin/true"
        echo "ResumeProgram=/bin/true"
        printf 'NodeName=paper[00001-%05d] State=CLOUD\n' "$PAPER_NODES"
    fi
    echo "PartitionName=DEFAULT Nodes=ALL DefaultTime=00:10:00 OverSubscribe=EXCLUSIVE"
    echo "PartitionName=batch Default=YES MaxTime=12:00:00"
    echo "PartitionName=extended MaxNodes=64 MaxTime=24:00:00"
    echo "PartitionName=batch-2h MaxNodes=91 MaxTime=02:00:00"
    echo "PartitionName=batch-6h MinNodes=92 MaxNodes=183 MaxTime=06:00:00"
    echo "PartitionName=batch-12h MinNodes=184 MaxTime=12:00:00"
}

gres_conf() {
    local device region
    for ((device = 0; device < DEVICES; device++)); do
        region=0
        while ((NEAREST[region] != device)); do region=$((region + 1)); done
        ln -sf /dev/null "$DIR/devices/gpu$device"  # any device file will do
        echo "Name=gpu Type=mi250x File=$DIR/devices/gpu$device Flags=amd_gpu_env" \
            "Cores=$((8 * region))-$((8 * region + 7))"
    done
}

# Runs as each task before its program does; what it prints on standard output changes the task's environment.
task_prolog() {
    cat <<PROLOG
#!/bin/bash
faults=$DIR/faults
nearest=(${NEAREST[*]})
PROLOG
    cat <<'PROLOG'
task=$SLURMD_NODENAME.$SLURM_LOCALID

# --gpu-bind=closest: without the binding to cores Slurm cannot know which device is closest to a task.
if [[ ${SLURMD_TRES_BIND:-} == *gpu:closest* ]]; then
    echo "export ROCR_VISIBLE_DEVICES=${nearest[SLURM_LOCALID % 8]}"
fi

# family PID: it and all that descend from it, in $family; without this process, as long as it descends from the prolog.
family() {
    local parent child
    family=("$1")
    for ((i = 0; i < ${#family[@]}; i++)); do
        while read -r child parent; do
            [[ $parent != "${family[i]}" || $child == "$$" ]] || family+=("$child")
        done <<<"$processes"
    done
}

throttle() {  # throttle PID PERCENT: in turns of a fifth of a second, as long as the process lives
    local family=() processes run hold turn=0
    printf -v run '0.%03d' $((2 * $2))
    printf -v hold '0.%03d' $((200 - 2 * $2))
    exec {never}<> <(:)  # a pipe that says nothing: waiting without a process for each wait
    while kill -CONT "$1"; do
        if ((turn++ % 5 == 0)); then processes=$(ps -e -o pid=,ppid=) && family "$1"; fi
        kill -CONT "${family[@]}"
        read -rt "$run" -u "$never"
        kill -STOP "${family[@]}"
        read -rt "$hold" -u "$never"
    done
    kill -CONT "${family[@]}"
}

if [[ -e $faults/slow-task.$task ]]; then
    # In a session of its own, since Slurm ends what a prolog leaves behind in its process group, as soon as it is done.
    export -f throttle family
    begun=$faults/.begun.$task.$SLURM_TASK_PID
    setsid bash -c ': >"$0"; throttle "$@"' "$begun" "$SLURM_TASK_PID" "$(<"$faults/slow-task.$task")" \
        </dev/null &>/dev/null &
    until [[ -e $begun ]]; do sleep 0.02; done
    rm -f "$begun"
fi
exit 0
PROLOG
}

# power_on NAME: its slurmd, first process of a namespace in which all its tasks live. /mnt has its own /mnt/bb, where
# Frontier's nodes have their NVMe, beside what this machine has there.
power_on() {
    ! runs "$DIR/run/$1.pid" || fail "$1 runs already"
    # shellcheck disable=SC2016  # for the shell inside
    setsid unshare --mount --uts --pid --fork --kill-child --mount-proc bash -c '
        set -e
        hostname "$1"
        mount --bind "$2/etc/hosts" /etc/hosts
        for there in /mnt/*/; do
            [[ -d $there && $there != /mnt/bb/ ]] || continue
            mkdir -p "$2/mnt/$1/${there#/mnt/}"
            mount --rbind "$there" "$2/mnt/$1/${there#/mnt/}"
        done
        mount --rbind "$2/mnt/$1" /mnt
        exec slurmd -D -f "$2/etc/slurm.conf" -N "$1"
    ' testbed "$1" "$DIR" </dev/null &>"$DIR/log/$1.out" &
    echo $! >"$DIR/run/$1.pid"
}

# power_off NAME: its first process in $first, which is gone once all others of the node are.
power_off() {
    runs "$DIR/run/$1.pid" || fail "$1 does not run"
    first=$(pgrep -P "$(<"$DIR/run/$1.pid")") || first=
    kill -KILL "$(<"$DIR/run/$1.pid")"
}

is_off() {  # is_off NAME FIRST
    local state
    ! runs "$DIR/run/$1.pid" || return 1
    [[ -n $2 ]] && state=$(ps -o stat= -p "$2") || return 0
    [[ $state == Z* ]]
}

in_service() {  # in_service NAME: it has registered; one that was set down has to be resumed by hand
    local node
    node=$(scontrol -o show node "$1")
    [[ $node == *SlurmdStartTime=2* && $node != *NOT_RESPONDING* ]] || return 1
    [[ $node == *State=DOWN* ]] || return 0
    scontrol update NodeName="$1" State=RESUME
    return 1
}

all_idle() {
    local name
    for name in $(names); do in_service "$name" || return 1; done
    [[ $(sinfo -h -N -t idle -o %N | sort -u | wc -l) -eq $NODES ]]  # sinfo tells nothing of nodes without power
}

start_controller() {  # start_controller FLAGS...
    slurmctld -f "$SLURM_CONF" "$@"
    until_true 300 slurmctld scontrol ping
}

stop_controller() {
    kill -TERM "$(<"$DIR/run/slurmctld.pid")"
    until_true 300 "the end of slurmctld" is_stopped
}

is_stopped() { ! runs "$DIR/run/slurmctld.pid"; }

waits() { [[ $(squeue -h -j "$1" -o %T) == PENDING ]]; }

start() {
    local name lacking
    lacking=$(missing)
    [[ -z $lacking ]] || fail "cannot run here: missing ${lacking//$'\n'/, }"
    ! runs "$DIR/run/slurmctld.pid" || fail "runs already in $DIR"
    configure
    munged --force --socket="$DIR/munge/socket" --key-file="$DIR/etc/munge.key" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed"
    until_true 120 munged munge --socket="$DIR/munge/socket" --no-input
    start_controller -c
    for name in $(names); do power_on "$name"; done
    until_true 300 "idle nodes" all_idle
}

stop() {
    local file
    for file in "$DIR"/run/node*.pid; do ! runs "$file" || kill -KILL "$(<"$file")"; done
    for file in "$DIR"/run/{slurmctld,munged}.pid; do ! runs "$file" || kill -TERM "$(<"$file")"; done
    for file in "$DIR"/run/*.pid; do
        for _ in {1..100}; do
            runs "$file" || break
            sleep 0.1
        done
        ! runs "$file" || kill -KILL "$(<"$file")"
        rm -f "$file"
    done
}

task_of() {  # task_of NAME LOCALID: checked, as the task prolog calls it
    names | grep -qx "$1" || fail "no node $1; there are $(names | paste -sd ' ')"
    [[ $2 =~ ^[0-9]+$ ]] || fail "local id $2 is no number"
    echo "$1.$2"
}

case ${1:-} in
    start | stop | missing) "$1" ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    lose-node)
        power_off "${2:?name of a node}"
        scontrol update NodeName="$2" State=DOWN Reason="lost by the testbed"
        until_true 300 "the end of $2" is_off "$2" "$first"  # until then it has its port
        ;;
    stop-controller) stop_controller ;;
    start-controller) start_controller ;;
    add-node)
        # The controller repeats, each minute, what it could not tell the lost node: to end the steps of its job. A
        # requeued job has steps of the same numbers, and is there sooner than after a real loss. It forgets that now.
        stop_controller
        start_controller
        power_on "${2:?name of a node}"
        until_true 600 "$2" in_service "$2"
        ;;
    hurry)
        until_true 600 "job ${2:?number of a job} to be requeued" waits "$2"
        sleep 2  # earlier, the credential of the job's new run would count as one of the old run, which is revoked
        scontrol update JobId="$2" StartTime=now
        ;;
    slow-task)
        [[ ${4:-} =~ ^[1-9][0-9]?$ ]] || fail "percent of the time: a number from 1 to 99"
        task=$(task_of "${2:?name of a node}" "${3:?local id of a task}")
        echo "$4" >"$DIR/faults/slow-task.$task"
        ;;
    mend) rm -f "$DIR"/faults/* ;;
    *)
        fail "usage: $0 start|stop|missing|env|lose-node NAME|add-node NAME|stop-controller|start-controller|" \
            "hurry JOB|slow-task NAME LOCALID PERCENT|mend"
        ;;
esac
