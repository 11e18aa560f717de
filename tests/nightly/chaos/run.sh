#!/usr/bin/env bash
# Injects every fault that training promises to survive, on one and two CPU ranks with a tiny model, and prints a line for each:
#   bash tests/nightly/chaos/run.sh [names of faults]
# LLAVA_PYTHON works as in all scripts. Exits with 1 if one is not as promised.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/lib.sh"
ensure_environment
LLAVA_PYTHON=$(command -v "$PYTHON_BIN")
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export LLAVA_PYTHON WORK DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$ROOT:$ROOT/tests/nightly:$ROOT/tests/helpers${PYTHONPATH:+:$PYTHONPATH}"
mkdir "$WORK/small"
# The disk that gets full is a small one, if the machine lets us mount it, inside a namespace that ends with us.
if unshare --mount --map-root-user mount -t tmpfs tmpfs "$WORK/small" 2>/dev/null; then
  # shellcheck disable=SC2016 # $WORK and $0 are for the inner shell
  unshare --mount --map-root-user bash -c 'mount -t tmpfs -o size=32m tmpfs "$WORK/small" && exec "$0" -m chaos.faults "$@"' \
    "$LLAVA_PYTHON" "$@"
else
  "$LLAVA_PYTHON" -m chaos.faults "$@"
fi
