#!/usr/bin/env bash
# What `make test-cluster` needs of a machine: says what is missing, and fails, or is silent.
missing=()
[[ $(uname -s) == Linux ]] || missing+=("Linux (this is $(uname -s))")
((EUID == 0)) || missing+=("root (sudo make test-cluster)")
for tool in ip tc unshare nsenter setpriv pkill sbatch slurmctld slurmd munged; do
    command -v "$tool" >/dev/null || missing+=("the command $tool")
done
((${#missing[@]})) || unshare --net --uts --mount true 2>/dev/null ||
    missing+=("the right to make network namespaces (unshare --net is refused)")
((${#missing[@]})) || exit 0
{
    echo "make test-cluster makes networks and a Slurm on this machine, and cannot run here. Missing:"
    printf '  %s\n' "${missing[@]}"
    echo "On Debian the commands come with: apt-get install iproute2 procps slurm-wlm munge"
} >&2
exit 1
