#!/usr/bin/env bash
# Stage 1, feature alignment: trains the projector and its norm; the language model and the vision tower stay frozen.
# Every upper-case name below can be set in the environment; --help lists them, DRY_RUN=1 shows what would run.
set -euo pipefail
STAGE=pretrain
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
load_preset "$@" # PRESET, NORM, and what both stages share

: "${DATA_PATH:=playground/data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json}"
: "${IMAGE_FOLDER=playground/data/LLaVA-Pretrain/images.zip}" # or the folder it was extracted to
DATA_SOURCE="run python -m llava.data.prepare llava-558k"
: "${PROMPT_VERSION:=plain}" "${MODEL_MAX_LENGTH:=2048}" # 729 visual tokens and a caption
: "${GLOBAL_BATCH:=256}" "${PER_DEVICE_BATCH:=2}" "${LEARNING_RATE:=1e-3}"
# Weights stay whole on every GPU: to train the projector, ZeRO-3 would gather them all twice for every micro-batch.
: "${DEEPSPEED_CONFIG=deepspeed_configs/zero2.json}" # an empty value means: without DeepSpeed
: "${OUTPUT_DIR:=checkpoints/$PRESET-$NORM-$STAGE}"

launch llava/train/train_mem.py \
  --plugin "${PLUGINS:-}" \
  --model_name_or_path "$MODEL_PATH" \
  --version "$PROMPT_VERSION" \
  --data_path "$DATA_PATH" \
  --image_folder "$IMAGE_FOLDER" \
  --image_aspect_ratio "${IMAGE_ASPECT_RATIO:-square}" \
  --image_grid_pinpoints "${IMAGE_GRID_PINPOINTS:-}" \
  --mm_patch_merge_type "${MM_PATCH_MERGE_TYPE:-}" \
  --vision_tower "$VISION_TOWER" \
  --mm_vision_select_layer -2 \
  --mm_vision_select_feature patch \
  --mm_projector_type "${PROJECTOR:-mlp2x_gelu}" \
  --mm_projector_norm "$NORM" \
  --mm_projector_norm_init "${NORM_INIT:-}" \
  --mm_projector_norm_learnable "${NORM_LEARNABLE:-}" \
  --tune_mm_mlp_adapter True \
  --label_masking "$LABEL_MASKING" \
  --model_max_length "$MODEL_MAX_LENGTH" \
  --deepspeed "$DEEPSPEED_CONFIG" \
  --activation_checkpointing "$ACTIVATION_CHECKPOINTING" \
  --per_device_train_batch_size "$PER_DEVICE_BATCH" \
  --max_tokens_per_micro_batch "${MAX_TOKENS_PER_MICRO_BATCH:-}" \
  --use_liger_kernel "$LIGER" \
  --optim "${OPTIM:-}" \
  --learning_rate "$LEARNING_RATE" \
  --lr_scheduler_type cosine \
  --warmup_ratio "${WARMUP_RATIO:-0.03}" \
  --weight_decay 0.0 \
  --num_train_epochs "$EPOCHS" \
  --max_steps "$MAX_STEPS" \
  --seed "$SEED" \
  --output_dir "$OUTPUT_DIR" \
  "$@"
