#!/usr/bin/env bash
# Scores a checkpoint on the paper's nine benchmarks, or on others by --tasks (or
# TASKS=llava-1.5, a group), with stock lmms-eval and lm-eval. See
# docs/evaluate.md.
#   bash scripts/evaluate.sh CKPT [--tasks pope,mmstar] [--output-dir DIR]
#                            [--data-dir DIR] [--limit N] ... (--help lists all)
# Finished tasks are kept; a second call does only what is missing. Exit status 1:
# a task failed, and its samples are named.
set -euo pipefail
# The Python command lists its flags, if there is an environment to run it in.
more_help() {
  cd "$(dirname "$0")/.."
  echo
  PYTHONDONTWRITEBYTECODE=1 "${LLAVA_PYTHON:-.venv/bin/python}" -m llava.eval.evaluate --help 2>/dev/null ||
    printf '%s\n' "Every flag is listed here once there is an environment:" \
      "  EXTRAS=eval,playground bash scripts/setup.sh"
}
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export EXTRAS="${EXTRAS:-eval,playground}"
ensure_environment
[ -z "${TASKS:-}" ] || set -- --tasks "$TASKS" "$@" # a flag of the caller's wins
for argument in "$@"; do
  # The data sets of these tasks are made from the pictures that the playground prepared.
  if [[ ",${argument#*=}," =~ ,(scenes|stamps|probes), ]] && [ -d "playground/data/${BASH_REMATCH[1]}" ]; then
    "$PYTHON_BIN" -m playground heldout
    break
  fi
done
exec "$PYTHON_BIN" -m llava.eval.evaluate "$@"
