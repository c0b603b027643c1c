#!/usr/bin/env bash
# Two hosts on one machine: run any torchrun command across a network of your own.
#
#     labs/two_hosts.sh                                                 labs/accumulate_vs_ddp.py on 2 × 4 ranks
#     labs/two_hosts.sh torchrun --nproc-per-node 4 labs/accumulate_vs_ddp.py --seed 7
#     labs/two_hosts.sh --rate 1gbit COMMAND…                           over a slow cable
#     labs/two_hosts.sh --unplug 20 COMMAND…                            pull the cable after 20 s
#
# Starts COMMAND twice at once, on "host0" and on "host1", as srun does on two nodes of a cluster.
# The two share the processors and the disk; each has a hostname, an address and a loopback interface
# of its own, and one cable between them, the interface eth0. Its traffic is the network's, and only
# that: what two ranks of one host tell each other stays on the host.
#
# torchrun reads its settings from PET_… variables too. They are set here to two nodes that meet at
# host0, with 4 ranks each, so COMMAND need not name them; what it does name wins. Both hosts see one
# empty folder in memory, $TWO_HOSTS_SHARED, that goes with them.
#
# --rate takes kbit, mbit or gbit (a token bucket at each end, in both directions). The exit code is
# the first failing one of the two. Once one host has ended, the other has 90 s (--grace SECONDS) to
# notice, and is stopped.
#
# Nothing can be left behind: interfaces, addresses, hostnames and processes live in namespaces that
# have no name, and the kernel removes them when this script ends, also if it is killed. It needs
# Linux, and root or a system that lets users make namespaces.
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
here=$(dirname -- "$self")

fail() { # MESSAGE
    printf 'two_hosts.sh: %s\n' "$1" >&2
    exit 2
}

# ── 3. On each host: wait for cable and peer, then become the command ──────────────────────────────
on_host() { # NUMBER COMMAND…
    local number=$1
    shift
    : >"$TWO_HOSTS_SHARED/.made$number"
    hostname "host$number"
    ip link set lo up
    while [[ ! -e $TWO_HOSTS_SHARED/.plugged ]]; do sleep 0.02; done
    ip address add "10.77.0.$((number + 1))/24" dev eth0
    ip link set eth0 up
    if [[ -n $RATE ]]; then
        tc qdisc add dev eth0 root tbf rate "$RATE" burst "$BURST" latency 50ms
    fi
    : >"$TWO_HOSTS_SHARED/.up$number"
    # The cable has a carrier only when both ends are up.
    until [[ -e $TWO_HOSTS_SHARED/.up$((1 - number)) ]]; do sleep 0.02; done
    unset RATE BURST UNPLUG GRACE
    export TWO_HOSTS_NUMBER=$number
    exec "$@"
}

# ── 2. In a process namespace of their own: two hosts and a cable ──────────────────────────────────
between_hosts() { # COMMAND…
    # The first process of a namespace ignores every signal that it has not asked for.
    trap 'exit 143' TERM
    mount -t tmpfs two_hosts "$TWO_HOSTS_SHARED"
    printf '127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n' >"$TWO_HOSTS_SHARED/.hosts"
    mount --bind "$TWO_HOSTS_SHARED/.hosts" /etc/hosts

    local hosts=() number code=0
    for number in 0 1; do
        unshare --net --uts --mount bash "$self" --on-host "$number" "$@" &
        hosts+=($!)
    done
    ip link add name end0 type veth peer name end1
    for number in 0 1; do
        # A network is known by a process in it, and unshare may not have made it yet.
        until [[ -e $TWO_HOSTS_SHARED/.made$number ]]; do
            kill -0 "${hosts[number]}" 2>/dev/null || fail "host$number could not be made"
            sleep 0.02
        done
        ip link set "end$number" netns "${hosts[number]}" name eth0
    done
    # Held open, a network outlives its processes: who ends first leaves the cable plugged in.
    exec 8<"/proc/${hosts[0]}/ns/net" 9<"/proc/${hosts[1]}/ns/net"
    : >"$TWO_HOSTS_SHARED/.plugged"

    if [[ -n $UNPLUG ]]; then
        (
            # A host that came up later would plug the cable in again.
            until [[ -e $TWO_HOSTS_SHARED/.up0 && -e $TWO_HOSTS_SHARED/.up1 ]]; do sleep 0.02; done
            sleep "$UNPLUG"
            # The open file names the network even after host1's process has ended.
            nsenter --net=/proc/self/fd/9 ip link set eth0 down
            echo "two_hosts.sh: the cable is unplugged" >&2
        ) &
    fi
    # Bounded from here on: whoever is left alone gets some seconds to notice.
    wait -n "${hosts[@]}" || code=$?
    # A host that never came up leaves the other waiting for it.
    [[ -e $TWO_HOSTS_SHARED/.up0 && -e $TWO_HOSTS_SHARED/.up1 ]] || GRACE=0
    (sleep "$GRACE" && echo "two_hosts.sh: one host ended $GRACE s ago; the other is stopped" >&2 &&
        kill -KILL "${hosts[@]}" 2>/dev/null) &
    for number in 0 1; do
        wait "${hosts[number]}" || code=$((code != 0 ? code : $?))
    done
    exit "$code"
}

# ── 1. As the caller: look at the arguments and at the machine ─────────────────────────────────────
main() {
    RATE='' BURST='' UNPLUG='' GRACE=90
    while (($#)); do
        case $1 in
        --rate)
            [[ ${2-} =~ ^([1-9][0-9]*)([kmg])bit$ ]] ||
                fail "--rate takes a whole number of kbit, mbit or gbit, such as 100mbit, not \"${2-}\""
            RATE=$2
            local -A thousands=([k]=1 [m]=1000 [g]=1000000)
            # The bucket holds 2 ms of the rate, and at least one packet of the largest kind.
            BURST=$((BASH_REMATCH[1] * thousands[${BASH_REMATCH[2]}] * 1000 / 8 / 500))
            BURST=$((BURST > 65536 ? BURST : 65536))
            shift 2
            ;;
        --unplug | --grace)
            [[ ${2-} =~ ^[0-9]+$ ]] || fail "$1 takes a whole number of seconds, not \"${2-}\""
            [[ $1 == --unplug ]] && UNPLUG=$2 || GRACE=$2
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$self"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        -*) fail "there is no option $1; see labs/two_hosts.sh --help" ;;
        *) break ;;
        esac
    done
    # A checkout's own environment comes first, and what the reader has activated next.
    [[ -d $here/../.venv/bin ]] && PATH=$(readlink -f "$here/../.venv/bin"):$PATH
    (($#)) || set -- torchrun "$here/accumulate_vs_ddp.py"

    [[ $(uname -s) == Linux ]] ||
        fail "network namespaces are Linux's, and this is $(uname -s). Two torchrun commands on one
machine show most of the same: see the chapter \"Two nodes\""
    local tool
    for tool in ip unshare setpriv nsenter pkill ${RATE:+tc}; do
        command -v "$tool" >/dev/null ||
            fail "there is no \"$tool\" on this machine (Debian: apt-get install iproute2 util-linux procps)"
    done
    command -v "$1" >/dev/null || fail "there is no command \"$1\"; is the environment active?"
    local as_root=()
    ((EUID)) && as_root=(unshare --user --map-root-user)
    "${as_root[@]}" unshare --net --uts --mount --pid --fork true 2>/dev/null ||
        fail "making namespaces is not allowed here: run it as root (sudo labs/two_hosts.sh …)"

    # A memory of their own in the place of this machine's: a temporary folder could be left behind.
    export TWO_HOSTS_SHARED=/dev/shm
    export RATE BURST UNPLUG GRACE
    export PET_NNODES=2 PET_NPROC_PER_NODE=4
    export PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=host0:29400 PET_RDZV_ID=two_hosts
    # A fresh store for the ranks after each restart; with the agents' own they miss one another.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PET_RDZV_CONF=join_timeout=60
    # Or torch warns, with many lines, that the host which ended first does not answer any more.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

    # If this script is killed, the kernel kills the next in line, and so on to the last process.
    "${as_root[@]}" setpriv --pdeathsig KILL \
        unshare --net --mount --pid --mount-proc --fork --kill-child \
        bash "$self" --between-hosts "$@" &
    local child=$! code=0
    trap 'stop "$child" 130' INT
    trap 'stop "$child" 143' TERM HUP
    wait "$child" || code=$?
    exit "$code"
}

stop() { # PROCESS EXIT_CODE
    trap '' INT TERM HUP
    # unshare passes no signal on, and what runs in the background ignores INT: tell the one below.
    pkill -TERM --parent "$1" || true
    wait "$1" || true
    exit "$2"
}

case ${1-} in
--between-hosts)
    shift
    between_hosts "$@"
    ;;
--on-host)
    shift
    on_host "$@"
    ;;
*) main "$@" ;;
esac
