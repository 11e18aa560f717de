# shellcheck shell=bash
# SmolLM2-135M and a small SigLIP on drawn scenes or stamps: both stages in minutes on two CPU cores.
: "${DEMO_DATA:=scenes}"
require_one_of DEMO_DATA "scenes stamps"
: "${MODEL_PATH:=playground/data/smollm2-135m-instruct}" "${VISION_TOWER:=playground/data/siglip-$DEMO_DATA}"
: "${DATA_PATH:=playground/data/$DEMO_DATA/$STAGE.json}" "${IMAGE_FOLDER=playground/data/$DEMO_DATA/images}"
# chatml begins with SmolLM2's system prompt. Without it a sample would have a third fewer tokens, but aligned visual
# tokens, standing at the very beginning, become attention sinks, and colours are hardly learnt (docs/analysis.md).
: "${PROMPT_VERSION:=chatml}" "${LABEL_MASKING:=assistant}" "${MODEL_MAX_LENGTH:=256}"
: "${GLOBAL_BATCH:=16}" "${PER_DEVICE_BATCH:=auto}" # auto: the device's whole share at once, no accumulation
: "${DEEPSPEED_CONFIG=}" "${NUM_WORKERS:=0}"
# The newest checkpoint alone is kept: 4 MB in stage 1, 1.5 GB and some seconds in stage 2.
: "${SAVE_STEPS:=40}"
# With the recipes' 0.03 stage 2 began with a loss that rose to three times its value in three steps.
: "${WARMUP_RATIO:=0.12}"
case $STAGE in
  pretrain) : "${MAX_STEPS:=16}" "${LEARNING_RATE:=2e-3}" ;;
  finetune)
    : "${MAX_STEPS:=44}" "${LEARNING_RATE:=3e-4}" "${PROJECTOR_LR=1e-3}" "${VISION_TOWER_LR=1e-4}"
    : "${LENGTH_GROUP_WINDOW:=1}" # the same batches on any number of CPU ranks
    ;;
esac
# shellcheck disable=SC2034 # read by llava/launch/inputs.py
INPUT_HINT="run: bash scripts/setup.sh && .venv/bin/python -m playground all"
