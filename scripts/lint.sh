#!/usr/bin/env bash
# Checks the sources without running them: all of ruff format types shell files, or those that are named. FIX=1: ruff and
# format fix what they can; files always does. scripts/test.sh and the hooks of .pre-commit-config.yaml call this script.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
readonly CHECKS="ruff format types shell files"
for check in "$@"; do
  [[ " $CHECKS " == *" $check "* ]] || die "$check is not one of: $CHECKS"
done
git rev-parse --git-dir >/dev/null 2>&1 || die "$ROOT is not a git checkout; git lists the files to check"
export EXTRAS="${EXTRAS:-train,playground,dev}"
ensure_environment

# Files that git tracks or would track, except deleted ones; arguments choose among them.
sources() {
  local file
  while IFS= read -r -d '' file; do
    if [ -f "$file" ]; then printf '%s\0' "$file"; fi
  done < <(git ls-files -z --cached --others --exclude-standard --deduplicate -- "$@")
}
program() { "$PYTHON_BIN" -c "import sysconfig; print(sysconfig.get_path('scripts') + '/$1')"; }
hook() { xargs -0 "$PYTHON_BIN" -m "pre_commit_hooks.$1" "${@:2}"; }

check_ruff() { if is_on "${FIX:-}"; then "$PYTHON_BIN" -m ruff check --fix .; else "$PYTHON_BIN" -m ruff check .; fi; }
check_format() { if is_on "${FIX:-}"; then "$PYTHON_BIN" -m ruff format .; else "$PYTHON_BIN" -m ruff format --check .; fi; }
check_types() { "$(program pyrefly)" check --python-interpreter-path "$PYTHON_BIN"; } # else it takes what PATH has
check_shell() { sources '*.sh' '*.sbatch' .ci/run | xargs -0 "$(program shellcheck)" -x; }
check_files() { # recorded numbers and figures are kept byte for byte, whatever their size
  local status=0 kept=(':!tests/golden' ':!docs/figures' ':!docs/data' ':!*.png')
  sources . "${kept[@]}" | hook end_of_file_fixer || status=1
  sources . "${kept[@]}" | hook trailing_whitespace_fixer || status=1
  sources . "${kept[@]}" | hook check_added_large_files --enforce-all --maxkb=200 || status=1
  return "$status"
}

# shellcheck disable=SC2086 # the list is made of words
[ $# -gt 0 ] || set -- $CHECKS
for check in "$@"; do "check_$check"; done
