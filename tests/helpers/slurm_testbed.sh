#!/usr/bin/env bash
# A throw-away Slurm cluster of virtual nodes on this machine: real munged, slurmctld and one slurmd per node, for what
# only a scheduler does: signals before the time limit, lost nodes, requeueing. Needs root, unshare and, on Debian,
#     apt-get install slurmctld slurmd slurm-client munge
#
#   slurm_testbed.sh start            start it; returns when all nodes are idle
#   slurm_testbed.sh stop             end it and every job; logs stay in the folder
#   slurm_testbed.sh missing          print what is missing to run it, nothing where it can run
#   slurm_testbed.sh env              print the line that points Slurm's commands at it
#   slurm_testbed.sh lose-node NAME   end everything on a node at once, and tell Slurm that it is down
#   slurm_testbed.sh add-node NAME    bring a lost node back
#   slurm_testbed.sh hurry JOB        start a requeued job now; Slurm would hold it for two minutes
#
# TESTBED_DIR (default /tmp/slurm_testbed), TESTBED_NODES (2) and TESTBED_PORT (16817, one port more per node) set where
# it is and how large. A node is a namespace of processes, mounts and host name: its name resolves inside of its jobs,
# and the death of its first process is the death of all of them. Nothing outside of the folder is changed.
set -euo pipefail

DIR=${TESTBED_DIR:-/tmp/slurm_testbed}
NODES=${TESTBED_NODES:-2}
PORT=${TESTBED_PORT:-16817}
PROGRAMS=(munged munge slurmctld slurmd sbatch srun scontrol squeue sinfo unshare)

export SLURM_CONF=$DIR/etc/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

fail() { echo "slurm_testbed.sh: $*" >&2; exit 1; }

names() { seq -f 'node%02.0f' "$NODES"; }

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
    local name number=0
    mkdir -p "$DIR"/{etc,log,run,state,spool,munge}
    chmod 755 "$DIR" "$DIR/munge" "$DIR/run"
    chmod 700 "$DIR/state"
    # Only the daemons of this cluster share the key.
    [[ -s $DIR/etc/munge.key ]] || (umask 077 && head -c 256 /dev/urandom >"$DIR/etc/munge.key")
    : >"$DIR/etc/cgroup.conf"
    echo "127.0.0.1 localhost $(hostname -s)" >"$DIR/etc/hosts"
    {
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
        echo "JobAcctGatherType=jobacct_gather/none"
        echo "AccountingStorageType=accounting_storage/none"
        echo "MpiDefault=none"
        echo "MailProg=/bin/true"
        # Nodes have the size that is written here, not that of this machine.
        echo "SlurmdParameters=config_overrides"
        echo "SelectType=select/cons_tres"
        echo "SelectTypeParameters=CR_Core"
        echo "SchedulerType=sched/backfill"
        echo "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
        # Short clocks: a node is lost after 6 s, SIGKILL follows SIGTERM after 5 s. The time limit itself is exact.
        echo "SlurmdTimeout=6"
        echo "KillWait=5"
        echo "OverTimeLimit=0"
        echo "MinJobAge=3600"
        echo "ReturnToService=2"
        echo "JobRequeue=1"
        echo "NodeName=DEFAULT Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000"
        for name in $(names); do
            number=$((number + 1))
            echo "NodeName=$name NodeAddr=127.0.0.$((100 + number)) Port=$((PORT + number))"
            echo "127.0.0.$((100 + number)) $name" >>"$DIR/etc/hosts"
            mkdir -p "$DIR/spool/$name"
        done
        echo "PartitionName=batch Nodes=ALL Default=YES MaxTime=24:00:00 DefaultTime=00:10:00 OverSubscribe=EXCLUSIVE"
    } >"$SLURM_CONF"
}

power_on() {  # power_on NAME: its slurmd, first process of a namespace in which all its tasks live
    ! runs "$DIR/run/$1.pid" || fail "$1 runs already"
    setsid unshare --mount --uts --pid --fork --kill-child --mount-proc bash -c '
        hostname "$1" && mount --bind "$2/etc/hosts" /etc/hosts && exec slurmd -D -f "$2/etc/slurm.conf" -N "$1"
    ' testbed "$1" "$DIR" </dev/null &>"$DIR/log/$1.out" &
    echo $! >"$DIR/run/$1.pid"
}

power_off() {
    runs "$DIR/run/$1.pid" || fail "$1 does not run"
    kill -KILL "$(<"$DIR/run/$1.pid")"
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
    [[ $(sinfo -h -N -t idle -o %N | sort -u | wc -l) -eq $NODES ]]
}

waits() { [[ $(squeue -h -j "$1" -o %T) == PENDING ]]; }

start() {
    local name lacking
    lacking=$(missing)
    [[ -z $lacking ]] || fail "cannot run here: missing ${lacking//$'\n'/, }"
    ! runs "$DIR/run/slurmctld.pid" || fail "runs already in $DIR"
    configure
    munged --force --socket="$DIR/munge/socket" --key-file="$DIR/etc/munge.key" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed"
    until_true 10 munged munge --socket="$DIR/munge/socket" --no-input
    slurmctld -f "$SLURM_CONF" -c
    until_true 20 slurmctld scontrol ping
    for name in $(names); do power_on "$name"; done
    until_true 30 "idle nodes" all_idle
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

case ${1:-} in
    start | stop | missing) "$1" ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    lose-node)
        power_off "${2:?name of a node}"
        scontrol update NodeName="$2" State=DOWN Reason="lost by the testbed"
        ;;
    add-node)
        power_on "${2:?name of a node}"
        until_true 20 "$2" in_service "$2"
        ;;
    hurry)
        until_true 60 "job ${2:?number of a job} to be requeued" waits "$2"
        sleep 2  # earlier, the credential of the job's new run would count as one of the old run, which is revoked
        scontrol update JobId="$2" StartTime=now
        ;;
    *) fail "usage: $0 start|stop|missing|env|lose-node NAME|add-node NAME|hurry JOB" ;;
esac
