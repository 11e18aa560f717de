# shellcheck shell=bash
# Qwen2.5-7B-Instruct with SigLIP-SO400M: the paper's recipe, whose other values are the scripts' defaults.
: "${MODEL_PATH:=Qwen/Qwen2.5-7B-Instruct}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=qwen_1_5}"
