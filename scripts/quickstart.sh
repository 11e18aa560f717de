#!/usr/bin/env bash
# A real two-stage MLLM on two CPU cores: prepares a language model, a vision
# tower and pictures, trains the baseline and the aligned, compensated norm
# through both stages, and compares them on held-out pictures. About 5 minutes.
#   --data scenes | stamps | probes       drawn scenes (default), photos of
#                                         Debian's tuxpaint-stamps-default, or
#                                         pictures for harder questions
#   ARMS="none layernorm gwc_layernorm"   which arms to train (default: none
#                                         gwc_layernorm); on a CPU side by side
#   OUTPUT_ROOT=folder                    where everything goes (default:
#                                         outputs/quickstart, or -stamps, -probes)
#   SEED=42                               seed of data order and initial projector
# Steps; what stands left and right of a `|` runs at the same time
# (llava/compare/quickstart.py):
#   .venv
#   language model | pictures, vision tower
#   stage 1, stage 2, answers of one arm | the same for the next arm
#   page: outputs/quickstart/index.html
# Finished steps are kept; a rerun does only what is missing. Variables of
# scripts/pretrain.sh apply too.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
DATA=scenes
while [ $# -gt 0 ]; do
  case $1 in
    --data) DATA=${2:-} && shift $(($# > 1)) ;;
    --data=*) DATA=${1#*=} ;;
    *) die "$1 is not a flag of this script; see --help" ;;
  esac
  shift
done
case $DATA in scenes | stamps | probes) ;; *) die "--data '$DATA' is not one of: scenes, stamps, probes; see --help" ;; esac
: "${ARMS:=none gwc_layernorm}" "${OUTPUT_ROOT:=outputs/quickstart$([ "$DATA" = scenes ] || echo "-$DATA")}"

# DeepSpeed and TensorBoard are installed only on request.
if [ -n "${DEEPSPEED_CONFIG:-}" ] || [[ "${REPORT_TO:-none}" != none ]]; then : "${EXTRAS:=playground,train}"; fi
export EXTRAS="${EXTRAS:-playground}"

ensure_environment
export -n ARMS OUTPUT_ROOT # the stages' scripts have other names for them, and would ask
exec "$PYTHON_BIN" -m llava.compare quickstart --data "$DATA" --arms "$ARMS" --output-dir "$OUTPUT_ROOT"
