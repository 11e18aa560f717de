#!/usr/bin/env bash
# Makes .venv at the repository root and installs the package with its pinned dependencies. Every other script calls it.
# It reads PYTHON (default: python3), EXTRAS of pyproject.toml (default: train,playground,dev; they add up over calls,
# and train brings liger where PyTorch is a build for NVIDIA GPUs), and LLAVA_PYTHON, an interpreter of your own
# environment: nothing is installed then. A call that finds nothing changed ends at once; calls at the same time wait for
# each other.
set -euo pipefail

[ $# -eq 0 ] || { echo "setup: takes no arguments, found: $*; its head names the variables that it reads" >&2 && exit 2; }

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
# A misspelt variable, such as EXTRA, is refused where the machine's Python is new enough to say so.
if "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  "${PYTHON:-python3}" -m llava.launch.settings || exit
fi
[ -z "${LLAVA_PYTHON:-}" ] || { printf 'setup: skipped, LLAVA_PYTHON=%s\n' "$LLAVA_PYTHON" && exit 0; }
readonly VENV_PYTHON=.venv/bin/python
readonly STAMP=.venv/setup.stamp # three lines: hash of what defines the environment, its place, the extras in it
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
wanted="${EXTRAS:-train,playground,dev}"

fail() { printf 'setup: %s\n' "$*" >&2 && exit 1; }

require_known_extras() {
  local known extra
  known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/ s/^\([a-z0-9]*\) = \[.*/\1/p' pyproject.toml | xargs)
  for extra in ${wanted//,/ }; do
    [[ " $known " == *" $extra "* ]] || fail "EXTRAS names '$extra'; pyproject.toml has: $known"
  done
  for extra in web:docs/chat.md trackio:docs/hub.md; do
    [[ " ${wanted//,/ } " != *" ${extra%%:*} "* ]] ||
      fail "EXTRAS names '${extra%%:*}', which cannot use Pillow 13; older versions resize pictures to other pixels than everything here was tested with; ${extra#*:} says how to install it"
  done
}

# The venv's Python version, read from its own record: starting an interpreter would take most of a second call's time.
venv_version() { sed -nE 's/^version(_info)? = //p' .venv/pyvenv.cfg 2>/dev/null || true; }
inputs_hash() { { cat pyproject.toml constraints.txt && venv_version; } | sha256sum | cut -d' ' -f1; }
stamp_line() { sed -n "$1p" "$STAMP" 2>/dev/null || true; }

python_version() { "$1" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null || true; }
is_wanted_python() { [ -z "${PYTHON:-}" ] || [ "$(python_version "$PYTHON")" = "$(venv_version)" ]; }

up_to_date() {
  [ -x "$VENV_PYTHON" ] && [ "$(stamp_line 1)" = "$(inputs_hash)" ] && [ "$(stamp_line 2)" = "$ROOT" ] || return 1
  is_wanted_python || return 1
  local extra
  for extra in ${wanted//,/ }; do
    [[ ",$(stamp_line 3)," == *",$extra,"* ]] || return 1
  done
}
end_if_up_to_date() { ! up_to_date || { echo "setup: .venv is up to date" && exit 0; }; }

# One line per step with its time; what the command printed is shown only when it fails.
step() {
  local title="$1" start=$SECONDS status=0
  shift
  printf 'setup: %-52s' "$title"
  "$@" >"$log" 2>&1 </dev/null || status=$?
  [ "$status" -ne 0 ] || { printf '%5d s\n' $((SECONDS - start)) && return; }
  printf ' failed\n'
  cat "$log" >&2
  fail "this command failed: $*"
}

make_venv() {
  local python="${PYTHON:-python3}" version
  version=$(python_version "$python")
  [ -n "$version" ] || fail "PYTHON=$python does not run; set PYTHON to a Python 3.11, 3.12 or 3.13"
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
    fail "PYTHON=$python is Python $version; expected 3.11, 3.12 or 3.13; set PYTHON to one of them"
  step "virtual environment .venv (Python $version)" "$python" -m venv --clear .venv
}

# A venv is kept unless it is broken, was moved, or PYTHON is another version.
usable_venv() {
  local place
  place=$(stamp_line 2)
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 && [ "${place:-$ROOT}" = "$ROOT" ] || return 1
  is_wanted_python
}

has_package() { compgen -G ".venv/lib/python*/site-packages/$1-[0-9]*.dist-info" >/dev/null; }

# Without byte code: compiling every file of every package takes longer than everything else; see compile_what_is_used.
pip_install() { "$VENV_PYTHON" -m pip install --progress-bar off --no-compile -c constraints.txt "$@"; }

# Compiles what training and evaluation import, a tenth of all files. The byte code is kept even if the caller's Python is
# told to keep none (PYTHONDONTWRITEBYTECODE, as in many containers): every later start would compile these files again.
compile_what_is_used() { env -u PYTHONDONTWRITEBYTECODE "$VENV_PYTHON" -c "import llava.train.train, llava.asking"; }

install() {
  local installed="" extras rest
  if usable_venv; then installed=$(stamp_line 3); else make_venv; fi
  extras=$(tr ',' '\n' <<<"$wanted,$installed" | sed '/^$/d' | sort -u | paste -sd, -)
  # While the stamp's first line is empty the environment counts as unfinished.
  printf '\n%s\n%s\n' "$ROOT" "$installed" >"$STAMP"
  # Torch before everything else: a looser requirement elsewhere must not choose another build of it.
  step "torch $(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)" pip_install "pip>=23" "setuptools>=77" torch
  # A build of PyTorch for NVIDIA GPUs has brought Triton, which is all that Liger's kernels need. This decides, not a GPU
  # in sight: the environment is often made on a node without one, and used on nodes without a network.
  [[ ",$extras," != *,train,* ]] || ! has_package triton || extras="$extras,liger"
  rest=$(tr ',' '\n' <<<"$extras" | sed '/^flash$/d' | paste -sd, -)
  # This package's build needs only setuptools, which is installed; a separate build environment would take some seconds.
  step "llava${rest:+[$rest]}" pip_install --no-build-isolation -e ".${rest:+[$rest]}"
  step "byte code of what is used" compile_what_is_used
  if [[ ",$extras," == *,flash,* ]]; then
    # flash-attn's build imports torch, so it must see this environment.
    step "build tools for flash-attn" pip_install setuptools wheel ninja packaging
    step "llava[flash] (compiles unless a wheel fits)" pip_install --no-build-isolation -e ".[flash]"
  fi
  if [[ ",$extras," == *,eval,* ]]; then
    step "lmms-eval, lm-eval (without their requirements)" pip_install --no-deps lmms-eval lm-eval
  fi
  printf '%s\n%s\n%s\n' "$(inputs_hash)" "$ROOT" "$extras" >"$STAMP"
}

require_known_extras
end_if_up_to_date

exec 9>.venv.lock
if command -v flock >/dev/null && ! flock -n 9; then
  echo "setup: waiting for another setup.sh"
  flock 9
fi
end_if_up_to_date
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install
printf 'setup: %-52s%5d s\n' "ready" "$SECONDS"
