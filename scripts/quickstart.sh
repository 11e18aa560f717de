#!/usr/bin/env bash
# A real two-stage MLLM on two CPU cores in 6 minutes with bf16, else about 14: prepares a language model, a vision tower
# and pictures, trains the baseline and the aligned, compensated norm, and compares them on held-out pictures
# (docs/first-hour.md). --help lists the flags; variables of scripts/pretrain.sh, such as SEED, apply too. A rerun does
# what is missing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# DeepSpeed and TensorBoard are installed only on request.
if [ -n "${DEEPSPEED_CONFIG:-}" ] || [[ "${REPORT_TO:-none}" != none ]]; then : "${EXTRAS:=playground,train}"; fi
: "${EXTRAS:=playground}"
run_module llava.compare quickstart "$@"
