#!/usr/bin/env bash
# Every figure that needs a GPU: one NVIDIA GPU of 80 GB or more, without a network, about an hour in all.
#   bash benchmarks/gpu_check.sh                             all parts, each under 10 minutes, then the table
#   bash benchmarks/gpu_check.sh --parts step_3b,tests       some of them; --help lists all
#   bash benchmarks/gpu_check.sh --minutes 10                what fits in ten minutes; the next call continues
#   bash benchmarks/gpu_check.sh --cpu                       what a CPU can run of it, with tiny shapes, in minutes
#   bash benchmarks/gpu_check.sh wheels FOLDER --python 3.12 [--have pyarrow pillow]
#                                                            where there is a network: collects the wheels that a machine
#                                                            with that Python, PyTorch, transformers and the packages after
#                                                            --have lacks, for Linux on x86-64
# A second call does only what is missing, failed or was killed. The table is outputs/gpu_check/summary.md.
#   LLAVA_PYTHON=/path    the interpreter to take as it is (default: .venv/bin/python if it is there, else python3)
#   WHEELS=folder         wheels that `wheels` collected; they are installed into outputs/gpu_packages, for this command only
set -euo pipefail
started=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "error: $*" >&2 && exit 2; }

# What the parts import beyond what every PyTorch and transformers require; a test holds that it is complete.
NEEDED="accelerate annotated-types cmeel cmeel-mimalloc deepspeed einops hjson iniconfig liger-kernel msgpack ninja peft
  pillow pluggy psutil py-cpuinfo pyarrow pydantic pydantic-core pygments pytest sentencepiece typing-extensions
  typing-inspection"

if [ -z "${LLAVA_PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then LLAVA_PYTHON=$PWD/.venv/bin/python; else LLAVA_PYTHON=python3; fi
fi
python=$(command -v "$LLAVA_PYTHON") || die "LLAVA_PYTHON=$LLAVA_PYTHON is not a program"
export LLAVA_PYTHON=$python PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# wheels FOLDER --python VERSION [--have NAME...]: the folder appears only when it is complete. It notes the commit, which
# results of a copy of this tree without .git then name, as long as the copy's sources are unchanged.
collect_wheels() {
  local usage="expected: wheels FOLDER --python 3.12 [--have NAME...]" folder version names=() platforms=() partial minor
  [ $# -ge 3 ] && [ "$2" = --python ] && [[ $3 =~ ^3\.[0-9]+$ ]] || die "wheels $*: $usage"
  folder=$1 version=$3
  shift 3
  [ $# -eq 0 ] || [ "$1" = --have ] || die "$1: $usage"
  [ -z "$(ls -A "$folder" 2>/dev/null)" ] || die "$folder is not empty; two versions of a wheel would clash, name a new folder"
  for name in $NEEDED; do
    case " deepspeed $* " in *" $name "*) ;; *) names+=("$name") ;; esac
  done
  # PyTorch's wheels need glibc 2.28, so a machine that has PyTorch runs wheels for that version and for older ones.
  for minor in $(seq 28 -1 5); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  for minor in 2014 2010 1; do platforms+=(--platform "manylinux${minor}_x86_64"); done
  partial=$folder.partial
  rm -rf "$partial" && mkdir -p "$partial"
  "$LLAVA_PYTHON" -m pip download -q --no-deps -c constraints.txt --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" -d "$partial" "${names[@]}"
  "$LLAVA_PYTHON" -m pip wheel -q --no-deps -c constraints.txt -w "$partial" deepspeed # published as source only
  [ -n "$(ls "$partial"/deepspeed-*-py3-none-any.whl 2>/dev/null)" ] || die "DeepSpeed's wheel was built for this machine alone"
  "$LLAVA_PYTHON" -c 'import sys; from pathlib import Path; from benchmarks.common import write_commit; write_commit(Path(sys.argv[1]))' "$partial"
  rm -rf "$folder" && mv "$partial" "$folder"
  du -ach "$folder"/*.whl
  echo "now carry $folder and call: WHEELS=$folder bash benchmarks/gpu_check.sh"
}

if [ "${1:-}" = wheels ]; then
  shift
  collect_wheels "$@"
  exit
fi
# Nothing here may wait for a network.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -n "${WHEELS:-}" ]; then
  [ -d "$WHEELS" ] || die "WHEELS=$WHEELS is not a folder"
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
