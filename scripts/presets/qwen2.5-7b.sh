# shellcheck shell=bash
# Qwen2.5-7B-Instruct with SigLIP-SO400M: the paper's recipe, whose other values are the scripts' defaults.
: "${MODEL_PATH:=Qwen/Qwen2.5-7B-Instruct}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=qwen_1_5}"
# On 8 cards of 80 GB nothing is recomputed with Liger's kernels: estimated 68 and 67 GiB; else layers recompute by themselves.
case $STAGE in
  pretrain) : "${MAX_TOKENS_PER_MICRO_BATCH=12288}" ;;
  finetune) : "${MAX_TOKENS_PER_MICRO_BATCH=8704}" ;;
esac
