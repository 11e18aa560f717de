#!/usr/bin/env bash
# Every measurement, table and figure of the paper for the given checkpoints. See docs/analysis.md.
#   bash scripts/analyze.sh [CKPT...]    a folder or hub id, with its name in the figures as NAME=CKPT if wanted
#                                        (default: outputs/quickstart/*/finetune)
#   OUTPUT_DIR=folder                    where everything goes (default: outputs/analysis)
#   DATA=file-or-folder                  samples to measure on (default: the playground's held-out scenes)
#   SAMPLES=1000                         how many (default: few, as each command's --help says)
#   COMMANDS="theory attention"          only these
# A command that fails is reported at the end; the others run all the same.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${OUTPUT_DIR:=outputs/analysis}" "${DATA:=}" "${SAMPLES:=}"
: "${COMMANDS:=interface-norms embedding-norms layer-norms update-rates norm-params gradients attention interventions theory}"
[ -z "$SAMPLES" ] || require_number SAMPLES 1

if [ $# -eq 0 ]; then
  for folder in outputs/quickstart/*/finetune; do
    [ ! -f "$folder/config.json" ] || set -- "$@" "$folder"
  done
fi
[ $# -gt 0 ] || die "no checkpoint given, and outputs/quickstart has none; run bash scripts/quickstart.sh"

MODELS=() NORMED=() OURS=()
for checkpoint in "$@"; do
  [[ "$checkpoint" != -* ]] || die "$checkpoint is not a checkpoint, and there are no options; see --help"
  MODELS+=(--model "$checkpoint")
  config="${checkpoint#*=}/config.json"
  ! grep -qsE '"model_type": "llava_(llama|qwen)"' "$config" || OURS+=(--model "$checkpoint")
  ! grep -qsE '"mm_projector_norm": "(gwc_)?(layer|rms)norm"' "$config" || NORMED+=(--model "$checkpoint")
done

TIMES=() FAILED=()
analyze() { # command arguments...
  local command="$1" start=$SECONDS
  shift
  printf '\n=== %s\n' "$command"
  "$PYTHON_BIN" -m llava.analysis "$command" "$@" --output-dir "$OUTPUT_DIR" || FAILED+=("$command")
  TIMES+=("$(printf '%-18s %5d s' "$command" $((SECONDS - start)))")
}

analyze_if() { # what a checkpoint must be, command, arguments...
  [ $# -gt 2 ] || { printf '\n=== %s\nskipped: no checkpoint %s\n' "$2" "$1"; return; }
  local arguments=("${@:3}")
  [ "$2" != gradients ] || arguments+=(${DATA:+--data "$DATA"}) # one batch, so SAMPLES is not for it
  analyze "$2" "${arguments[@]}"
}

export EXTRAS="${EXTRAS:-analysis}"
ensure_environment
for command in $COMMANDS; do
  case $command in
    embedding-norms) analyze "$command" "${MODELS[@]}" ;;
    norm-params) analyze_if "has a norm" "$command" "${NORMED[@]}" ;;
    gradients) analyze_if "is one of this tree's" "$command" "${OURS[@]}" ;;
    *) analyze "$command" "${MODELS[@]}" ${DATA:+--data "$DATA"} ${SAMPLES:+--samples "$SAMPLES"} ;;
  esac
done

printf '\n=== time of each command\n'
printf '%s\n' "${TIMES[@]}" "$(printf '%-18s %5d s' all "$SECONDS")"
echo "tables and figures: $OUTPUT_DIR"
[ ${#FAILED[@]} -eq 0 ] || die "failed: ${FAILED[*]}"
