#!/usr/bin/env bash
# Low-precision communication on a slow wire: two hosts, made of network namespaces, joined by a link of 200 Mbit/s.
#
#   bash tools/benchmarks/two_nodes.sh --json FILE [--rounds N] [--tokens N]      RATE=200mbit chooses another link
#
# One torchrun a host, one process each; `two_nodes.py` says what is measured. Everything it makes is removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

RATE=${RATE:-200mbit}
for tool in ip tc; do
    if ! command -v "$tool" >/dev/null; then
        echo "two_nodes.sh needs the command '$tool' (Debian: apt-get install iproute2)" >&2
        exit 2
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "two_nodes.sh needs root, to make network namespaces and to limit the link between them" >&2
    exit 2
fi
case " $* " in
*" --json "*) ;;
*)
    echo "usage: bash tools/benchmarks/two_nodes.sh --json FILE [--rounds N] [--tokens N]" >&2
    exit 2
    ;;
esac
source tools/setup_env.sh

ID=$$
HOSTS=("fsdp2a$ID" "fsdp2b$ID")
LINKS=("va$ID" "vb$ID")
ADDRESSES=(10.203.7.1 10.203.7.2)
remove() {
    kill "${JOB:-}" 2>/dev/null || true
    for host in "${HOSTS[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
}
trap remove EXIT

for host in "${HOSTS[@]}"; do ip netns add "$host"; done
ip link add "${LINKS[0]}" netns "${HOSTS[0]}" type veth peer name "${LINKS[1]}" netns "${HOSTS[1]}"
for i in 0 1; do
    ip -n "${HOSTS[$i]}" address add "${ADDRESSES[$i]}/24" dev "${LINKS[$i]}"
    ip -n "${HOSTS[$i]}" link set lo up
    ip -n "${HOSTS[$i]}" link set "${LINKS[$i]}" up
    ip netns exec "${HOSTS[$i]}" tc qdisc add dev "${LINKS[$i]}" root tbf rate "$RATE" burst 256kb latency 50ms
done

run() { # host number, words for two_nodes.py
    local host=$1
    shift
    exec ip netns exec "${HOSTS[$host]}" env GLOO_SOCKET_IFNAME="${LINKS[$host]}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        torchrun --nnodes 2 --node_rank "$host" --nproc_per_node 1 --master_addr "${ADDRESSES[0]}" --master_port 29400 \
        tools/benchmarks/two_nodes.py --interface "${LINKS[$host]}" --link "$RATE" "$@"
}
(run 1 "$@") &
JOB=$!
(run 0 "$@")
wait "$JOB"
