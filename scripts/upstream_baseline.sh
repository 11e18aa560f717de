#!/usr/bin/env bash
# Trains LLaVA 1.2.2.post1 and this tree on the same model and data, both stages, and prints their losses side by side:
# tiny ones of tests/golden in minutes on the CPU, or those of MODEL_PATH, VISION_TOWER, PRETRAIN_DATA, PRETRAIN_IMAGES,
# FINETUNE_DATA and FINETUNE_IMAGES on one GPU. PREPARE_ONLY=1 makes only upstream's environment. It also reads ARMS
# MAX_STEPS PER_DEVICE_BATCH SEED MODEL_MAX_LENGTH BF16 GRADIENT_CHECKPOINTING TOLERANCE OUTPUT_DIR, and UPSTREAM_VENV and
# PYTHON for upstream's environment. patches/README.md says what the numbers mean.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -eq 0 ] || die "$(basename "$0") takes no arguments, found: $*; its head names the variables that it reads"

readonly INPUTS=tests/golden/train/inputs REQUIREMENTS=patches/baseline/requirements.txt LLAVA=llava-torch==1.2.2.post1
if [ -z "${MODEL_PATH:-}" ]; then
  export CUDA_VISIBLE_DEVICES="" # a GPU would round the tiny models differently and save no time
fi
: "${MODEL_PATH:=$INPUTS/llama}" "${VISION_TOWER:=$INPUTS/clip}" # a Llama with tokenizer.model, and a CLIP
: "${PRETRAIN_DATA:=$INPUTS/stage1.json}" "${PRETRAIN_IMAGES:=$INPUTS/img}"
: "${FINETUNE_DATA:=$INPUTS/stage2.json}" "${FINETUNE_IMAGES:=$INPUTS/img}"
: "${ARMS:=none layernorm gwc_layernorm}" "${MAX_STEPS:=20}" "${PER_DEVICE_BATCH:=4}" "${SEED:=42}" "${MODEL_MAX_LENGTH:=2048}"
BF16=$(is_on "${BF16:-}" && echo True || echo False)
GRADIENT_CHECKPOINTING=$(is_on "${GRADIENT_CHECKPOINTING:-}" && echo True || echo False)
: "${TOLERANCE:=$(is_on "$BF16" && echo inf || echo 1e-4)}" # a larger difference between two losses gives status 1
: "${OUTPUT_DIR:=outputs/upstream_baseline}"
: "${UPSTREAM_VENV:=.venv-upstream}" "${PYTHON:=python3}"
export HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}" # with several GPUs the Trainer would split batches among them

# Upstream's environment, made once: torch first, then what that LLaVA needs, then LLaVA itself beside the packages,
# because two copies of it are compared.
ensure_upstream() {
  local stamp="$UPSTREAM_VENV/baseline.stamp" wanted version pip=("$UPSTREAM_VENV/bin/python" -m pip --disable-pip-version-check)
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "PYTHON=$PYTHON does not run"
  wanted="$version $LLAVA $(sha256sum <"$REQUIREMENTS")"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$UPSTREAM_VENV/bin/python" -c '' 2>/dev/null; then return; fi
  [[ "$version" =~ ^3\.1[0-2]$ ]] ||
    die "PYTHON=$PYTHON is Python $version; upstream's tokenizers 0.15.1 needs 3.10 to 3.12; set PYTHON to such a Python"
  echo "upstream_baseline: making $UPSTREAM_VENV, some minutes"
  "$PYTHON" -m venv --clear "$UPSTREAM_VENV"
  "${pip[@]}" install -q "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$REQUIREMENTS")"
  "${pip[@]}" install -q -r "$REQUIREMENTS"
  "${pip[@]}" install -q --no-deps --target "$UPSTREAM_VENV/original" "$LLAVA"
  echo "$wanted" >"$stamp"
}

ensure_environment
ensure_upstream
if is_on "${PREPARE_ONLY:-}"; then exit 0; fi
rm -rf "$UPSTREAM_VENV/patched" "$OUTPUT_DIR"/{original,patched,ours}
cp -R "$UPSTREAM_VENV/original" "$UPSTREAM_VENV/patched"
"$PYTHON_BIN" patches/apply.py "$UPSTREAM_VENV/patched"
"$PYTHON_BIN" patches/baseline/compare.py --upstream-python "$UPSTREAM_VENV/bin/python" \
  --original "$UPSTREAM_VENV/original" --patched "$UPSTREAM_VENV/patched" --output "$OUTPUT_DIR" \
  --model "$MODEL_PATH" --vision-tower "$VISION_TOWER" --arms "$ARMS" \
  --pretrain-data "$PRETRAIN_DATA" --pretrain-images "$PRETRAIN_IMAGES" \
  --finetune-data "$FINETUNE_DATA" --finetune-images "$FINETUNE_IMAGES" \
  --steps "$MAX_STEPS" --batch "$PER_DEVICE_BATCH" --seed "$SEED" --max-length "$MODEL_MAX_LENGTH" \
  --bf16 "$BF16" --gradient-checkpointing "$GRADIENT_CHECKPOINTING" --tolerance "$TOLERANCE"
