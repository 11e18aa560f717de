# shellcheck shell=bash
# SmolLM2-135M and a small SigLIP on drawn scenes or probes: both stages in minutes on two CPU cores.
: "${DEMO_DATA:=scenes}"
require_one_of DEMO_DATA "scenes probes"
: "${MODEL_PATH:=playground/data/smollm2-135m-instruct}" "${VISION_TOWER:=playground/data/siglip-$DEMO_DATA}"
: "${DATA_PATH:=playground/data/$DEMO_DATA/$STAGE.json}" "${IMAGE_FOLDER=playground/data/$DEMO_DATA/images}"
# SmolLM2's own markers, with a system prompt of four words: SmolLM2's has 17, more than a caption. Without one, aligned
# visual tokens stand at the very beginning and become attention sinks (docs/analysis.md).
: "${PROMPT_VERSION:=chatml_direct}" "${LABEL_MASKING:=assistant}" "${MODEL_MAX_LENGTH:=256}"
: "${PER_DEVICE_BATCH:=auto}" # auto: the device's whole share at once, no accumulation
: "${DEEPSPEED_CONFIG=}" "${NUM_WORKERS:=0}"
# A run of two minutes saves only at its end, or when a signal ends it.
[ -n "${SAVE_STEPS:-}" ] || : "${SAVE_STRATEGY:=no}"
[ -z "${EPOCHS:-}" ] || : "${MAX_STEPS:=-1}" # a number of steps would win
# With the recipes' 0.03, stage 2 would reach its full rate in three steps, and its loss would rise.
: "${WARMUP_RATIO=0.12}"
case $STAGE in
  pretrain) : "${MAX_STEPS:=68}" "${GLOBAL_BATCH:=16}" "${LEARNING_RATE:=8e-3}" ;;
  finetune)
    # Probes have nine kinds of questions to learn, the others two or three.
    : "${MAX_STEPS:=$([ "$DEMO_DATA" = probes ] && echo 140 || echo 70)}"
    : "${GLOBAL_BATCH:=8}" "${LEARNING_RATE:=2e-4}" "${PROJECTOR_LR=2e-3}" "${VISION_TOWER_LR=1e-4}"
    : "${GROUP_BY_MODALITY_LENGTH:=False}" # a batch has no padding, and captions and questions stay mixed
    ;;
esac
# shellcheck disable=SC2034 # read by llava/launch/inputs.py
INPUT_HINT="run: ${LLAVA_PYTHON:-bash scripts/setup.sh && .venv/bin/python} -m playground all --data $DEMO_DATA"
