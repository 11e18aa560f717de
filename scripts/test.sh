#!/usr/bin/env bash
# The checks of scripts/lint.sh, and tests. FAST=1 leaves out the slow ones; arguments go to pytest, as in: bash scripts/test.sh -k norm
#   WORKERS=2    processes that share the test files (default: 2); 0 runs all in one, as --pdb needs it
#   COVERAGE=1   also measures which branches of llava/ run, in all processes; half as long again
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export EXTRAS="${EXTRAS:-train,playground,dev,eval,analysis,docs}" # eval: a stock harness scores a checkpoint; docs: the site
ensure_environment

# Nothing in the tests needs the model hub: with it shut they behave the same on every machine.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

bash scripts/lint.sh
selection=()
is_on "${FAST:-}" && selection=(-m "not slow")
# Many tests wait for a process that they start, so two workers take the files by turns, each on one thread.
: "${WORKERS:=2}"
require_number WORKERS 0
workers=()
if [ "$WORKERS" != 0 ]; then
  workers=(-n "$WORKERS" --dist loadfile --no-loadscope-reorder)
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
pytest=(-m pytest "${workers[@]}" "${selection[@]}" "$@")
is_on "${COVERAGE:-}" || exec "$PYTHON_BIN" "${pytest[@]}"
"$PYTHON_BIN" -m coverage erase
"$PYTHON_BIN" -m coverage run "${pytest[@]}"
"$PYTHON_BIN" -m coverage combine -q
whole=()
[ ${#selection[@]} -eq 0 ] && [ $# -eq 0 ] || whole=(--fail-under=0) # a part of the tests has no share to reach
"$PYTHON_BIN" -m coverage report "${whole[@]}"
