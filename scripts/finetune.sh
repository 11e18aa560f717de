#!/usr/bin/env bash
# Stage 2, full instruction tuning: trains the language model, the projector with its norm, and the vision tower.
# LORA=1: LLaVA's LoRA recipe, in which the tower stays frozen.
# Every upper-case name below can be set in the environment; --help lists them, DRY_RUN=1 shows what would run.
set -euo pipefail
STAGE=finetune
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
if is_on "${LORA:-}"; then # before the preset, whose learning rates are for full tuning
  : "${LORA_R:=128}" "${LORA_ALPHA:=256}" "${LEARNING_RATE:=2e-4}" "${PROJECTOR_LR=2e-5}" "${VISION_TOWER_LR=}"
  : "${TUNABLE_PARTS:=mm_mlp_adapter,mm_language_model}"
else
  [ -z "${LORA_R:-}${LORA_ALPHA:-}" ] || die "LORA_R and LORA_ALPHA need LORA=1"
  LORA_R="" LORA_ALPHA=""
fi
load_preset "$@" # PRESET, NORM, and what both stages share

: "${DATA_PATH:=playground/data/LLaVA-NeXT-Data/data}" "${IMAGE_FOLDER=}" # the Parquet rows hold their images
DATA_SOURCE="run python -m llava.data.prepare llava-next"
: "${PRETRAIN_ADAPTER=checkpoints/$PRESET-$NORM-pretrain/mm_projector.bin}" # empty: MODEL_PATH brings its projector
: "${TUNABLE_PARTS:=mm_vision_tower,mm_mlp_adapter,mm_language_model}"
: "${MODEL_MAX_LENGTH:=4096}" "${GROUP_BY_MODALITY_LENGTH:=True}" "${GLOBAL_BATCH:=128}" "${PER_DEVICE_BATCH:=1}"
: "${LENGTH_GROUP_WINDOW:=auto}" # 1, as in LLaVA, or 16 if a device has fewer than 8 samples of a step
: "${LEARNING_RATE:=1e-5}" "${VISION_TOWER_LR=2e-6}" "${PROJECTOR_LR=}" # empty: LEARNING_RATE
: "${DEEPSPEED_CONFIG=deepspeed_configs/zero3.json}" # an empty value means: without DeepSpeed
: "${OUTPUT_DIR:=checkpoints/$PRESET-$NORM-$STAGE${LORA_R:+-lora}}"

launch \
  --pretrain_mm_mlp_adapter "$PRETRAIN_ADAPTER" \
  --mm_tunable_parts "$TUNABLE_PARTS" \
  --lora_enable "${LORA_R:+True}" \
  --lora_r "$LORA_R" \
  --lora_alpha "$LORA_ALPHA" \
  --group_by_modality_length "$GROUP_BY_MODALITY_LENGTH" \
  --length_group_window "$LENGTH_GROUP_WINDOW" \
  --mm_vision_tower_lr "$VISION_TOWER_LR" \
  --mm_projector_lr "$PROJECTOR_LR" \
  "$@"
