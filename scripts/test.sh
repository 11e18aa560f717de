#!/usr/bin/env bash
# The checks of scripts/lint.sh, then the tests; arguments go to pytest: bash scripts/test.sh -k norm
# FAST=1 leaves out slow tests. WORKERS=2 processes share the test files (0: all in one, which --pdb needs). COVERAGE=1
# measures which branches run. FAMILIES=all takes every family of models, not six. ATEN_CPU_CAPABILITY=avx2
# ONEDNN_MAX_CPU_ISA=AVX2: as on a CPU without AVX-512.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export EXTRAS="${EXTRAS:-train,playground,dev,eval,analysis,trl}" # eval for the stock harnesses
ensure_environment

# No test needs the model hub; without it they behave the same on every machine.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The tests start hundreds of Pythons. Told to keep no byte code, each would compile the same files again.
unset PYTHONDONTWRITEBYTECODE

bash scripts/lint.sh
selection=()
is_on "${FAST:-}" && selection=(-m "not slow")
# Many tests wait for a process that they start, so two workers share the files, each on one thread.
: "${WORKERS:=2}"
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
[ ${#selection[@]} -eq 0 ] && [ $# -eq 0 ] || whole=(--fail-under=0) # only the whole suite has a share to reach
"$PYTHON_BIN" -m coverage report "${whole[@]}"
