#!/usr/bin/env bash
# A Slurm of two nodes on this machine, for as long as one job runs.
#
#     labs/slurm/one_machine.sh                                   two_nodes.sbatch as it is
#     labs/slurm/one_machine.sh [SBATCH OPTIONS…] FILE [ARGUMENTS…]
#
# Starts Slurm's true daemons on the two hosts of labs/two_hosts.sh: munge and slurmd on each, and
# slurmctld on host0. Submits with sbatch, waits for the end of the job, prints its output, and exits
# with 0 if Slurm says COMPLETED. Keys, configuration, state and logs of Slurm lie in a memory of the
# two hosts; they, the daemons and the network are gone when this script ends, however it ends.
#
# Needs Linux, root, and Debian's packages: apt-get install slurm-wlm munge iproute2
set -euo pipefail

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
LIMIT=600 # seconds for the job, from its submission

fail() { # MESSAGE
    printf 'one_machine.sh: %s\n' "$1" >&2
    exit 2
}

wait_for() { # SECONDS WHAT COMMAND…
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" &>/dev/null; do
        ((SECONDS < deadline)) || {
            tail -n 20 "$shared"/*.log >&2 || true
            fail "$what did not happen in time; above, the ends of the daemons' logs"
        }
        sleep 0.2
    done
}

configure() {
    dd if=/dev/urandom of="$shared/munge.key" bs=128 count=1 status=none
    chmod 400 "$shared/munge.key"
    mkdir -p "$shared/state" "$shared/host0" "$shared/host1"
    local processors memory
    processors=$(nproc)
    memory=$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
    cat >"$shared/slurm.conf" <<END
ClusterName=one_machine
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPidFile=$shared/slurmctld.pid
SlurmctldLogFile=$shared/slurmctld.log
StateSaveLocation=$shared/state
SlurmdPidFile=$shared/%n/slurmd.pid
SlurmdLogFile=$shared/%n.log
SlurmdSpoolDir=$shared/%n
NodeName=host0,host1 CPUs=$processors RealMemory=$memory State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    : >"$shared/configured"
}

start_daemons() {
    export SLURM_CONF=$shared/slurm.conf
    # A /run of this host's own, for the socket.
    mount -t tmpfs -o mode=755 run /run
    munged --force --key-file "$shared/munge.key" --socket /run/munge.socket \
        --pid-file /run/munged.pid --log-file "$shared/munged-$(hostname).log" --seed-file /run/seed
    [[ $(hostname) == host0 ]] && slurmctld
    slurmd -N "$(hostname)"
}

both_idle() { [[ $(sinfo --noheader --Node --format %T | sort -u) == idle ]]; }
over() { [[ -z $(squeue --noheader --jobs "$job" 2>/dev/null) ]]; }

on_host() {
    shared=$TWO_HOSTS_SHARED
    if [[ $TWO_HOSTS_NUMBER == 1 ]]; then
        wait_for 100 "the configuration" test -e "$shared/configured"
        start_daemons
        wait_for $((LIMIT + 60)) "the end of the job" test -e "$shared/over"
        return
    fi
    trap ': >"$shared/over"' EXIT
    configure
    start_daemons
    wait_for 100 "both nodes' being idle" both_idle
    # torchrun and the interface are told to the job, not taken over from two_hosts.sh.
    unset "${!PET_@}"
    job=$(sbatch --parsable --export="ALL,INTERFACE=eth0,LOGS=$shared/logs" --output="$shared/output" "$@")
    wait_for "$LIMIT" "the end of the job" over
    cat "$shared/output"
    local state
    state=$(scontrol show job --oneliner "$job" | sed 's/.*JobState=\([A-Z_]*\).*/\1/')
    echo "Slurm: job $job $state on $(scontrol show job --oneliner "$job" |
        sed 's/.* NodeList=\([^ ]*\).*/\1/')"
    [[ $state == COMPLETED ]]
}

if [[ ${1-} == --on-host ]]; then
    shift
    on_host "$@"
    exit
fi
[[ ${1-} == --help || ${1-} == -h ]] && {
    sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "${BASH_SOURCE[0]}"
    exit
}
for tool in sbatch slurmctld slurmd munged; do
    command -v "$tool" >/dev/null ||
        fail "there is no \"$tool\" on this machine (Debian: apt-get install slurm-wlm munge)"
done
((EUID == 0)) || fail "Slurm's daemons need root: sudo labs/slurm/one_machine.sh …"
(($#)) || set -- "$here/two_nodes.sbatch"
exec "$here/../two_hosts.sh" "$here/one_machine.sh" --on-host "$@"
