#!/usr/bin/env bash
# Every figure that needs a GPU: one NVIDIA GPU of 80 GB or more, without a network, a little over half an hour in all.
#   bash benchmarks/gpu_check.sh                             all parts, each under 10 minutes, then the table
#   bash benchmarks/gpu_check.sh --plan                      their order and seconds
#   bash benchmarks/gpu_check.sh --parts step_3b,tests       some of them
#   bash benchmarks/gpu_check.sh --minutes 10                what fits in ten minutes; the next call continues
#   bash benchmarks/gpu_check.sh --cpu                       what a CPU can run of it, with tiny shapes, in minutes
#   bash benchmarks/gpu_check.sh wheels FOLDER --python 3.12 [--have pyarrow pillow]
#                                                            where there is a network: collects what a machine lacks that
#                                                            has that Python, PyTorch, transformers and the packages named
# A second call does only what is missing, failed or was killed. The table is outputs/gpu_check/summary.md.
#   LLAVA_PYTHON=/path    the interpreter to take as it is (default: .venv/bin/python if it is there, else python3)
#   WHEELS=folder         wheels that `wheels` collected; they are installed into outputs, for this command only
set -euo pipefail
started=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "error: $*" >&2 && exit 2; }

if [ -z "${LLAVA_PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then LLAVA_PYTHON=$PWD/.venv/bin/python; else LLAVA_PYTHON=python3; fi
fi
python=$(command -v "$LLAVA_PYTHON") || die "LLAVA_PYTHON=$LLAVA_PYTHON is not a program"
export LLAVA_PYTHON=$python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ "${1:-}" = wheels ]; then exec "$python" -m benchmarks.gpu_wheels collect "${@:2}"; fi

# Nothing here may wait for a network.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
if [ -n "${WHEELS:-}" ]; then
  [ -d "$WHEELS" ] || die "WHEELS=$WHEELS is not a folder"
  "$python" -m benchmarks.gpu_wheels install "$WHEELS"
  export PYTHONPATH="$PYTHONPATH:$PWD/outputs/gpu_packages" UPSTREAM_PACKAGES="$PWD/outputs/gpu_upstream"
fi
exec "$python" -m benchmarks.gpu_check --started "$started" "$@"
