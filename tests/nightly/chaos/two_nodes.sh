#!/usr/bin/env bash
# Two hosts in network namespaces of this machine, joined by a veth pair: they train by ZeRO-3, lose the link in
# mid-run, both end in bounded time, and go on after a restart. Needs no root, but a kernel that allows namespaces;
# elsewhere it says so and exits with 0.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/lib.sh"
if [ "${1:-}" != inside ]; then
  if ! unshare --net --mount --uts --map-root-user ip link add probe type veth peer name other 2>/dev/null; then
    echo "skipped: this machine allows no network namespace with a veth pair (unshare --net --uts --map-root-user; ip link add)"
    exit 0
  fi
  ensure_environment # here, since the hosts have no network
  exec unshare --net --mount --uts --map-root-user bash tests/nightly/chaos/two_nodes.sh inside
fi
LLAVA_PYTHON=$(command -v "$PYTHON_BIN")
WORK=$(mktemp -d)
unshare --net --uts sleep infinity & # holds the second host's namespaces
OTHER_HOST=$!
trap 'kill $OTHER_HOST; rm -rf "$WORK"' EXIT
until [ "$(readlink /proc/$OTHER_HOST/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add link0 type veth peer name link1 netns $OTHER_HOST
ip address add 10.77.0.1/24 dev link0
ip link set lo up
ip link set link0 up
nsenter --target $OTHER_HOST --net --uts \
  bash -c "hostname node1; ip link set lo up; ip address add 10.77.0.2/24 dev link1; ip link set link1 up"
hostname node0
printf '127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n' >"$WORK/hosts"
mount --bind "$WORK/hosts" /etc/hosts
export LLAVA_PYTHON WORK OTHER_HOST DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$ROOT:$ROOT/tests/nightly:$ROOT/tests/helpers${PYTHONPATH:+:$PYTHONPATH}"
"$LLAVA_PYTHON" -m chaos.two_nodes
