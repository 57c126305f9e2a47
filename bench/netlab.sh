#!/usr/bin/env bash
# Several hosts on one machine, joined by links that a token bucket slows down. As root, with iproute2 (ip, tc):
#
#   netlab.sh HOSTS RANKS_PER_HOST RATE SCRIPT [ARG ...]      netlab.sh 2 1 1gbit linear.py
#
# A host is a network namespace. Its interface eth0 sends at most RATE; ranks of one host talk over its loopback, at full
# speed. Each rank is one process with one thread, and finds RANK, LOCAL_RANK and their like in its environment, as from
# torch's launcher. The namespaces have no way out. PYTHON names the interpreter (default: python3). The exit status is
# 1 when a rank failed (the others are then stopped), else 0.
set -u

if [ $# -lt 4 ]; then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
hosts=$1 ranks=$2 rate=$3
shift 3
lab=swlab$$ # interface names have at most 15 characters

take_down() {
  for ((host = 0; host < hosts; host++)); do
    ip link del "$lab-$host" 2>/dev/null # a namespace, and its link, would live on until its last process ends
    ip netns del "$lab-$host" 2>/dev/null
  done
  ip link del "$lab" 2>/dev/null
}
trap take_down EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM

set -e
ip link add "$lab" type bridge
ip link set "$lab" up
for ((host = 0; host < hosts; host++)); do
  ip netns add "$lab-$host"
  ip link add eth0 netns "$lab-$host" type veth peer name "$lab-$host"
  ip link set "$lab-$host" master "$lab" up
  ip -n "$lab-$host" address add "10.77.0.$((host + 1))/24" dev eth0
  ip -n "$lab-$host" link set lo up
  ip -n "$lab-$host" link set eth0 up
  ip netns exec "$lab-$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256k latency 400ms
done
set +e

export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
export WORLD_SIZE=$((hosts * ranks)) LOCAL_WORLD_SIZE=$ranks
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$((rank % ranks)) ip netns exec "$lab-$((rank / ranks))" "${PYTHON:-python3}" "$@" &
done
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  if ! wait -n; then
    kill $(jobs -p) 2>/dev/null
    exit 1
  fi
done
