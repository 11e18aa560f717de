# shellcheck shell=bash
# LLaVA-1.5-7B: Vicuna-7B-v1.5 with CLIP-L/336, and the hyper-parameters of haotian-liu/LLaVA's scripts/v1_5, where the
# projector has no norm: NORM=none. Micro-batches and ZeRO are also LLaVA's, for 8 cards of 80 GB.
: "${MODEL_PATH:=lmsys/vicuna-7b-v1.5}" "${VISION_TOWER:=openai/clip-vit-large-patch14-336}"
: "${MODEL_MAX_LENGTH:=2048}"
case $STAGE in
  pretrain) : "${GLOBAL_BATCH:=256}" "${PER_DEVICE_BATCH:=32}" "${LEARNING_RATE:=1e-3}" ;;
  finetune)
    : "${DATA_PATH:=playground/data/LLaVA-Instruct-150K/llava_v1_5_mix665k.json}"
    : "${IMAGE_FOLDER=playground/data/LLaVA-Instruct-150K}"
    : "${PROMPT_VERSION:=v1}" "${IMAGE_ASPECT_RATIO:=pad}"
    : "${TUNABLE_PARTS:=mm_mlp_adapter,mm_language_model}" "${VISION_TOWER_LR=}" # the tower stays frozen
    : "${GLOBAL_BATCH:=128}" "${PER_DEVICE_BATCH:=16}" "${LEARNING_RATE:=2e-5}"
    # shellcheck disable=SC2034 # read by llava/launch/inputs.py
    INPUT_HINT="run python -m llava.data.prepare llava-665k"
    ;;
esac
