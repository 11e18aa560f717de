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

launch \
  --tune_mm_mlp_adapter True \
  "$@"
