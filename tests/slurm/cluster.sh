#!/bin/bash
# A real Slurm on this machine alone: `cluster.sh up DIR NUM_NODES PORT | off DIR NODE | on DIR NODE | down DIR`.
# Its nodes are slurmds on the loopback address, each with all that it starts in a PID namespace of its own (root): ending
# the namespace is what losing the power of a node is.
set -euo pipefail
what=$1 dir=$2
export SLURM_CONF=$dir/slurm.conf

boot() {
    setsid unshare --pid --fork --kill-child=KILL --mount --mount-proc slurmd -D -N "$1" \
        </dev/null >"$dir/log/$1.out" 2>&1 &
    echo $! >"$dir/run/$1.pid"
}

end() { # the process of a file of its number
    [ -e "$1" ] || return 0
    kill "-$2" "$(cat "$1")" 2>/dev/null || true
    for _ in $(seq 100); do kill -0 "$(cat "$1")" 2>/dev/null || break; sleep 0.1; done
    rm -f "$1"
}

up() {
    local num_nodes=$1 port=$2 user
    user=$(id -un)
    mkdir -p "$dir"/{run,log,spool,state,munge}
    chmod 755 "$dir"
    chmod 700 "$dir/munge"
    head -c 128 /dev/urandom >"$dir/munge/key"
    chmod 400 "$dir/munge/key"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/run/munge.sock
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SrunPortRange=$((port + 100))-$((port + 899))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmdTimeout=6
SlurmctldTimeout=10
MessageTimeout=10
KillWait=5
MinJobAge=600
TCPTimeout=2
RebootProgram=/bin/true
NodeName=n[1-$num_nodes] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + num_nodes))] CPUs=4 RealMemory=512 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" --num-threads=2
    slurmctld -c -f "$SLURM_CONF"
    for i in $(seq "$num_nodes"); do boot "n$i"; done
    for _ in $(seq 300); do
        [ "$(timeout 5 sinfo -h -t idle -o %D 2>/dev/null || true)" = "$num_nodes" ] && exit 0
        sleep 0.1
    done
    echo "the nodes have not come up: see $dir/log" >&2
    exit 1
}

case $what in
up) up "$3" "$4" ;;
off) end "$dir/run/$3.pid" KILL ;;
on) boot "$3" ;;
down)
    for node in "$dir"/run/n*.pid; do end "$node" KILL; done
    for daemon in slurmctld munged; do end "$dir/run/$daemon.pid" TERM; done
    ;;
esac
