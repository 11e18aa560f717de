# shellcheck shell=bash disable=SC2034
# What every script needs: the repository root as working directory, the Python to use, and clear refusals. Sourced.
# Relative paths therefore mean the same from wherever a script is called: relative to the root.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT" || exit 1

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

is_on() { [[ ! "${1:-0}" =~ ^(0|no|false|False)$ ]]; }

require_number() { # NAME smallest
  if ! [[ "${!1}" =~ ^(0|[1-9][0-9]{0,8})$ ]] || [ "${!1}" -lt "$2" ]; then
    die "$1=${!1} is not a whole number of at least $2"
  fi
}

require_one_of() { # NAME "allowed values"
  [[ " $2 " == *" ${!1} "* ]] || die "$1=${!1} is not one of: $2"
}

# .venv of this repository, or the caller's own environment by LLAVA_PYTHON.
PYTHON_BIN=.venv/bin/python
if [ -n "${LLAVA_PYTHON:-}" ]; then
  PYTHON_BIN=$(command -v "$LLAVA_PYTHON") || die "LLAVA_PYTHON=$LLAVA_PYTHON is not a program"
fi

# Makes or updates .venv; the caller's own environment is taken as it is and only told where the package lies.
# C++ ops that DeepSpeed builds on first use go into .venv: in the home folder two environments would overwrite each
# other's, and a build that was killed would leave a lock there on which every later run waits.
ensure_environment() {
  bash scripts/setup.sh
  if [ -n "${LLAVA_PYTHON:-}" ]; then
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  else
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$ROOT/.venv/torch_extensions}"
  fi
}

# ---- long work in steps ------------------------------------------------------------------------------------------------

TIMES=()

# Runs one step, shows what it prints, and remembers its time.
step() { # title command...
  local title="$1" start=$SECONDS
  shift
  printf '\n=== %s\n' "$title"
  "$@"
  TIMES+=("$(printf '%-44s %5d s' "$title" $((SECONDS - start)))")
}

show_times() {
  printf '\n=== time of each step\n'
  printf '%s\n' "${TIMES[@]}" "$(printf '%-44s %5d s' all "$SECONDS")"
}
