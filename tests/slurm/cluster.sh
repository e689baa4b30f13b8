#!/bin/bash
# A real Slurm on this machine alone (root):
#     cluster.sh up DIR NUM_NODES PORT [NUM_RACKS] | off DIR NODE | on DIR NODE | down DIR
# Its nodes are slurmds on the loopback address, each with all that it starts in a PID namespace of its own: ending the
# namespace is what losing the power of a node is. Partition `test` has those, and is the default; jobs of `urgent`, which
# has the same, preempt its jobs; `h100` has 129 nodes with 8 GPUs each, of a cloud that has none, for jobs that are only
# looked at. PLUGINS names the folder of Slurm's plugins where that is not Debian's.
set -euo pipefail
# Slurm listens where the host's name leads to, which is to be this machine alone, whatever is in /etc/hosts.
[ "${IN_OWN_UTS:-}" ] || IN_OWN_UTS=yes exec unshare --uts bash "$0" "$@"
hostname localhost
what=$1 dir=$2
export SLURM_CONF=$dir/slurm.conf

boot() {
    setsid unshare --pid --fork --kill-child=KILL --mount --mount-proc slurmd -D -d "$(command -v slurmstepd)" -N "$1" \
        </dev/null >"$dir/log/$1.out" 2>&1 &
    echo $! >"$dir/run/$1.pid"
}

end() { # the process of a file of its number
    local pid state
    [ -e "$1" ] || return 0
    pid=$(cat "$1")
    kill -KILL "$pid" 2>/dev/null || true
    # The process that inherits it may not reap it.
    while read -r _ _ state _ 2>/dev/null <"/proc/$pid/stat" && [ "$state" != Z ]; do sleep 0.1; done
    rm -f "$1"
}

up() {
    local num_nodes=$1 port=$2 num_racks=${3:-0} user
    user=$(id -un)
    mkdir -p "$dir"/{run,log,spool,state,munge}
    chmod 755 "$dir"
    chmod 700 "$dir/munge"
    head -c 128 /dev/urandom >"$dir/munge/key"
    chmod 400 "$dir/munge/key"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# A job that is back in the queue waits for the end of credentials, by default of two minutes.
AuthInfo=socket=$dir/run/munge.sock,cred_expire=20
${PLUGINS:+PluginDir=$PLUGINS}
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
TopologyPlugin=topology/$([ "$num_racks" = 0 ] && echo none || echo tree)
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Longer than a busy machine keeps a slurmd waiting: whether a node is down is for the tests to say.
SlurmdTimeout=120
SlurmctldTimeout=10
MessageTimeout=30
# What ends in good order when it is asked to has the time, however busy the machine.
KillWait=30
MinJobAge=600
TCPTimeout=5
RebootProgram=/bin/true
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
GresTypes=gpu
NodeName=n[1-$num_nodes] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + num_nodes))] CPUs=4 RealMemory=512 State=UNKNOWN
NodeName=g[1-129] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 31))-$((port + 159))] CPUs=96 RealMemory=1024 Gres=gpu:8 State=CLOUD
PartitionName=test Nodes=n[1-$num_nodes] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-$num_nodes] MaxTime=INFINITE State=UP PriorityTier=2
PartitionName=h100 Nodes=g[1-129] MaxTime=INFINITE State=UP
CONF
    # Nodes are dealt out to the racks in turn, so that the order of their names is not that of racks.
    for rack in $(seq "$num_racks"); do
        echo "SwitchName=rack$rack Nodes=$(seq -s, -f 'n%g' "$rack" "$num_racks" "$num_nodes")"
    done >"$dir/topology.conf"
    [ "$num_racks" = 0 ] || echo "SwitchName=core Switches=rack[1-$num_racks]" >>"$dir/topology.conf"
    munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" --num-threads=2
    slurmctld -c -f "$SLURM_CONF"
    for i in $(seq "$num_nodes"); do boot "n$i"; done
    for _ in $(seq 300); do
        if [ "$(timeout 5 sinfo -h -p test -t idle -o %D 2>/dev/null || true)" = "$num_nodes" ]; then
            timeout 60 srun --nodes="$num_nodes" true && exit 0
            echo "the nodes are up, and run nothing: see $dir/log" >&2
            exit 1
        fi
        sleep 0.1
    done
    echo "the nodes have not come up: see $dir/log" >&2
    exit 1
}

case $what in
up) up "${@:3}" ;;
off) end "$dir/run/$3.pid" ;;
on) boot "$3" ;;
down) # nothing of it is of use any more
    for daemon in "$dir"/run/{slurmctld,n*,munged}.pid; do end "$daemon"; done
    ;;
esac
