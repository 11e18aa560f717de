# shellcheck shell=bash
# Llama-3.2-3B-Instruct with SigLIP-SO400M: the paper's recipe, whose other values are the scripts' defaults.
: "${MODEL_PATH:=meta-llama/Llama-3.2-3B-Instruct}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=llava_llama_3}"
