#!/usr/bin/env bash
# Trains the demo's first four steps twenty times on a busy machine, and counts what came out: equal commands, seeds and
# machines must give equal weights. Exits with 1 if they did not, and shows how the runs' records differ.
#   bash tests/nightly/repeats.sh [number]
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
ensure_environment
readonly NUMBER=${1:-20}
WORK=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$WORK"' EXIT
for ((core = 0; core < $(nproc); core++)); do # a load of bursts, so that threads lose their cores at any moment
  "$PYTHON_BIN" -c 'import random, time
while True:
    end = time.time() + random.random()
    while time.time() < end: pass
    time.sleep(random.random())' &
done
for ((run = 1; run <= NUMBER; run++)); do
  PRESET=demo MAX_STEPS=4 REPORT_TO=none OUTPUT_DIR="$WORK/$run" bash scripts/pretrain.sh >"$WORK/$run.log" 2>&1 || {
    tail "$WORK/$run.log"
    exit 1
  }
  printf '%s  run %s\n' "$(sha256sum "$WORK/$run/mm_projector.bin" | cut -c1-16)" "$run" | tee -a "$WORK/weights"
done
cut -c1-16 "$WORK/weights" | sort | uniq -c
[ "$(cut -c1-16 "$WORK/weights" | sort -u | wc -l)" -eq 1 ] && exit
first=$(awk 'NR == 1 { one = $1 } $1 != one { print $3; exit }' "$WORK/weights")
diff "$WORK/1/run.json" "$WORK/$first/run.json" || true
diff "$WORK/1/train_log.jsonl" "$WORK/$first/train_log.jsonl" || true
exit 1
