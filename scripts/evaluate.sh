#!/usr/bin/env bash
# Scores a checkpoint on the paper's nine benchmarks, or on others by --tasks, with stock lmms-eval and lm-eval
# (docs/evaluate.md); --help lists the flags. TASKS means the same as --tasks, which wins.
#   bash scripts/evaluate.sh CKPT [--tasks pope,mmstar]
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${EXTRAS:=eval,playground}"
[ -z "${TASKS:-}" ] || set -- --tasks "$TASKS" "$@"
for argument in "$@"; do
  # The data sets of these tasks are made from the pictures that the playground prepared.
  if [[ ",${argument#*=}," =~ ,(scenes|probes), ]] && [ -d "playground/data/${BASH_REMATCH[1]}" ]; then
    export EXTRAS
    ensure_environment
    "$PYTHON_BIN" -m playground heldout
    break
  fi
done
run_module llava.eval.evaluate "$@"
