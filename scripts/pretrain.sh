#!/usr/bin/env bash
# Stage 1, feature alignment: trains the projector and its norm; the language model and the vision tower stay frozen.
#   PRESET=llama-3.2-3b NORM=gwc_layernorm bash scripts/pretrain.sh [more flags of the trainer]
# Every upper-case name below can be set in the environment. DRY_RUN=1 shows what would run. See docs/launch.md.
set -euo pipefail
STAGE=pretrain
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
load_preset

: "${PROMPT_VERSION:=plain}"
: "${DATA_PATH:=playground/data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json}"
: "${IMAGE_FOLDER=playground/data/LLaVA-Pretrain/images.zip}" # or the folder it was extracted to
DATA_SOURCE="run python -m llava.data.prepare llava-558k"
: "${GLOBAL_BATCH:=256}" "${PER_DEVICE_BATCH:=2}" "${LEARNING_RATE:=1e-3}"
: "${MODEL_MAX_LENGTH:=2048}" # 729 visual tokens and a caption
set_common_defaults

resolve_devices
resolve_batch
resolve_launch

add_common_flags
flag --tune_mm_mlp_adapter True

run_stage "$@"
