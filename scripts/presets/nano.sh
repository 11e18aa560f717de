# shellcheck shell=bash
# Qwen3-0.6B with SigLIP 2 base, for one card or more: the paper's recipe otherwise. With the SO400M tower, stage 2 on one
# card of 24 GB would need offload.
: "${MODEL_PATH:=Qwen/Qwen3-0.6B}" "${VISION_TOWER:=google/siglip2-base-patch16-384}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=qwen_3}" "${LABEL_MASKING:=assistant}" # the template is not LLaVA's
: "${DEEPSPEED_CONFIG=auto}" "${MAX_TOKENS_PER_MICRO_BATCH=auto}" # by what the cards have (docs/scale.md)
