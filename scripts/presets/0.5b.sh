# shellcheck shell=bash
# Qwen2.5-0.5B-Instruct with SigLIP-SO400M, for one card or more: the paper's recipe, whose other values are the scripts' defaults.
: "${MODEL_PATH:=Qwen/Qwen2.5-0.5B-Instruct}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=qwen_1_5}"
: "${DEEPSPEED_CONFIG=auto}" "${MAX_TOKENS_PER_MICRO_BATCH=auto}" # by what the cards have (docs/scale.md)
