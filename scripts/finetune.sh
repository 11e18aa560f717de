#!/usr/bin/env bash
# Stage 2, full instruction tuning: trains the language model, the projector with its norm, and the vision tower.
#   PRESET=llama-3.2-3b NORM=gwc_layernorm bash scripts/finetune.sh [more flags of the trainer]
#   LORA=1 PRESET=... NORM=...             bash scripts/finetune.sh   LLaVA's LoRA recipe; the tower stays frozen
# Every upper-case name below can be set in the environment. DRY_RUN=1 shows what would run. See docs/launch.md.
set -euo pipefail
STAGE=finetune
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
if is_on "${LORA:-}"; then # before the preset, whose learning rates are for full tuning
  : "${LORA_R:=128}" "${LORA_ALPHA:=256}" "${LEARNING_RATE:=2e-4}" "${PROJECTOR_LR=2e-5}" "${VISION_TOWER_LR=}"
  : "${TUNABLE_PARTS:=mm_mlp_adapter,mm_language_model}"
fi
load_preset

: "${DATA_PATH:=playground/data/LLaVA-NeXT-Data/data}"
: "${IMAGE_FOLDER=}" # the rows of the Parquet shards hold their images
DATA_SOURCE="run python -m llava.data.prepare llava-next"
: "${PRETRAIN_ADAPTER=checkpoints/$PRESET-$NORM-pretrain/mm_projector.bin}" # empty: MODEL_PATH brings its projector
: "${GLOBAL_BATCH:=128}" "${PER_DEVICE_BATCH:=1}"
: "${LEARNING_RATE:=1e-5}" "${VISION_TOWER_LR=2e-6}" "${PROJECTOR_LR=}" # empty: LEARNING_RATE
: "${MODEL_MAX_LENGTH:=4096}" # 729 visual tokens and 3367 of text
: "${TUNABLE_PARTS:=mm_vision_tower,mm_mlp_adapter,mm_language_model}" "${GROUP_BY_MODALITY_LENGTH:=True}"
is_on "${LORA:-}" && : "${OUTPUT_DIR:=checkpoints/$PRESET-$NORM-$STAGE-lora}"
set_common_defaults

resolve_devices
resolve_batch
resolve_launch

add_common_flags
if is_on "${LORA:-}"; then
  flag --lora_enable True
  flag --lora_r "$LORA_R"
  flag --lora_alpha "$LORA_ALPHA"
fi
flag --pretrain_mm_mlp_adapter "$PRETRAIN_ADAPTER"
flag --mm_tunable_parts "$TUNABLE_PARTS"
flag --mm_vision_tower_lr "$VISION_TOWER_LR"
flag --mm_projector_lr "$PROJECTOR_LR"
flag --group_by_modality_length "$GROUP_BY_MODALITY_LENGTH"

run_stage "$@"
