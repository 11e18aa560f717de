#!/usr/bin/env bash
# Serves a quickstart's checkpoints by vLLM on the CPU and compares its answers to the held-out questions with ours:
#   bash tests/serving/run.sh [--checkpoints outputs/quickstart] [--questions 40] [--dtype float32] ...
# The stock class serves NORM=none, without any plugin; this package's plugin serves the norm. Every difference is explained,
# and more than rounding ends with status 1. vLLM has an environment of its own, .venv-serving or $SERVING_VENV, made once of
# requirements.txt beside this file ($PYTHON: Python 3.11 or 3.12). LLAVA_PYTHON as in all scripts.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
readonly REQUIREMENTS=tests/serving/requirements.txt
: "${SERVING_VENV:=.venv-serving}" "${PYTHON:=python3}"

# vLLM's environment, made once; this package is installed beside it without what it needs for training.
ensure_serving() {
  local stamp="$SERVING_VENV/serving.stamp" wanted pip=("$SERVING_VENV/bin/python" -m pip --disable-pip-version-check install -q)
  wanted="$ROOT $("$PYTHON" --version) $(cat "$REQUIREMENTS" pyproject.toml | sha256sum)" || die "PYTHON=$PYTHON does not run"
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  echo "serving: making $SERVING_VENV, some minutes and gigabytes"
  "$PYTHON" -m venv --clear "$SERVING_VENV"
  "${pip[@]}" --no-deps -r "$REQUIREMENTS"
  "${pip[@]}" --no-deps --editable .
  echo "$wanted" >"$stamp"
}

ensure_environment
ensure_serving
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON_BIN" tests/serving/compare.py --vllm "$SERVING_VENV/bin/vllm" "$@"
