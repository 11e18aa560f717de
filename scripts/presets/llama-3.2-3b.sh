# shellcheck shell=bash
# Llama-3.2-3B-Instruct with SigLIP-SO400M: the paper's recipe, whose other values are the scripts' defaults.
: "${MODEL_PATH:=meta-llama/Llama-3.2-3B-Instruct}"
[ "$STAGE" = pretrain ] || : "${PROMPT_VERSION:=llava_llama_3}"
# On 8 cards of 80 GB nothing is recomputed: estimated 38 and 54 GiB. Fewer or smaller cards recompute by themselves.
case $STAGE in
  pretrain) : "${MAX_TOKENS_PER_MICRO_BATCH=12288}" ;;
  # Whole weights fit, and sending gradients alone takes no more bytes than ZeRO-3 (docs/clusters.md).
  finetune) : "${MAX_TOKENS_PER_MICRO_BATCH=8704}" "${DEEPSPEED_CONFIG=deepspeed_configs/zero2.json}" ;;
esac
