#!/usr/bin/env bash
# Trains several arms with the same data, initial weights and budget, scores them, and writes one page with a verdict.
#   bash scripts/compare.sh --preset demo --seeds 2      SmolLM2-135M on scenes and stamps, an hour on two CPU cores
#   bash scripts/compare.sh --preset llama-3.2-3b        the paper's recipe and its nine benchmarks
#   --seeds N | --seeds 1,2     how many (42, 43, ...; default 1), or which
#   --arms a,b                  of none, layernorm, gwc_layernorm (default: these), layernorm_default (initial gain 1), ...
#   --tasks a,b                 of scripts/evaluate.sh (default: the paper's nine; demo: scenes,stamps)
#   --output-dir DIR            default: outputs/compare-<preset>
#   --upstream                  also trains the baseline by upstream LLaVA, and stops if losses differ (docs/compare.md)
# Variables of scripts/pretrain.sh and finetune.sh apply to every run. EVALUATE_FLAGS="--limit 20" goes to evaluate.sh,
# ANALYSIS="update-rates attention" chooses commands of scripts/analyze.sh, which also takes DATA and SAMPLES.
# Finished steps are kept; after an interruption the same call goes on. See docs/compare.md.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=scripts/steps.sh
source scripts/steps.sh
FIRST_SEED=42 # the paper's
PRESET=llama-3.2-3b SEEDS=1 ARMS=none,layernorm,gwc_layernorm TASKS="" OUTPUT="" UPSTREAM=0

while [ $# -gt 0 ]; do
  case $1 in
    --upstream) UPSTREAM=1 ;;
    --preset | --seeds | --arms | --tasks | --output-dir)
      [ $# -gt 1 ] || die "$1 needs a value"
      case $1 in
        --preset) PRESET=$2 ;;
        --seeds) SEEDS=$2 ;;
        --arms) ARMS=$2 ;;
        --tasks) TASKS=$2 ;;
        --output-dir) OUTPUT=$2 ;;
      esac
      shift
      ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
    *) die "$1 is not an option; see --help" ;;
  esac
  shift
done
require_one_of PRESET "$(basename -s .sh scripts/presets/*.sh | xargs)"
[[ "$SEEDS" =~ ^[0-9]+(,[0-9]+)*,?$ ]] || die "--seeds $SEEDS: expected a count, as in 2, or a list, as in 1,2 or 7,"
if [[ "$SEEDS" != *,* ]]; then
  require_number SEEDS 1
  SEEDS=$(seq -s, "$FIRST_SEED" $((FIRST_SEED + SEEDS - 1)))
fi
SEEDS=${SEEDS%,}
: "${OUTPUT:=outputs/compare-$PRESET}"
IFS=, read -ra arms <<<"$ARMS"
IFS=, read -ra seeds <<<"$SEEDS"
for NORM in "${arms[@]%_default}"; do require_one_of NORM "none layernorm gwc_layernorm rmsnorm gwc_rmsnorm"; done
[[ " ${arms[*]} " != *" none_default "* ]] || die "--arms none_default: without a norm there is no gain to start at 1"
[ "$(printf '%s\n' "${arms[@]}" | sort -u | wc -l)" -eq ${#arms[@]} ] || die "--arms $ARMS names an arm twice"
[ "$(printf '%s\n' "${seeds[@]}" | sort -u | wc -l)" -eq ${#seeds[@]} ] || die "--seeds $SEEDS names a seed twice"
[[ "${arms[0]}" = none && ${#arms[@]} -gt 1 ]] || die "--arms $ARMS: expected none, the baseline, first, and at least one more"

# ---- what a preset brings ----------------------------------------------------------------------------------------------

: "${ANALYSIS:=interface-norms layer-norms update-rates norm-params attention}" "${EVALUATE_FLAGS:=}"
PREPARE=()
[ -n "${DATA:-}" ] || PREPARE+=(scenes) # what the analysis measures on
if [ "$PRESET" = demo ]; then
  PREPARE=(smollm2 scenes stamps tower mixed heldout)
  # A quarter of the records are stamps: half as many steps again leave the scenes what the quickstart gives them.
  export MAX_STEPS="${MAX_STEPS:-120}" IMAGE_FOLDER="${IMAGE_FOLDER:-playground/data}"
  : "${TASKS:=scenes,stamps}"
  # So small a model may have nothing to say about a photo; two small tasks start faster together.
  [ -n "$EVALUATE_FLAGS" ] || EVALUATE_FLAGS="--allow-empty --together --batch-size 8"
fi
export EXTRAS="${EXTRAS:-train,playground,eval,analysis}" REPORT_TO="${REPORT_TO:-tensorboard}"

# ---- steps -------------------------------------------------------------------------------------------------------------

folder_of() { echo "$OUTPUT/seed-$1/$2"; } # seed arm

train() { # stage seed arm
  local folder norm="${3%_default}" init=""
  folder=$(folder_of "$2" "$3")
  [ "$norm" = "$3" ] || init=default
  local settings=(PRESET="$PRESET" NORM="$norm" NORM_INIT="$init" SEED="$2" RUN_NAME="$3-seed-$2-$1")
  settings+=(PRETRAIN_ADAPTER="$folder/pretrain/mm_projector.bin")
  [ "$PRESET" != demo ] || settings+=(DATA_PATH="playground/data/mixed/$1.json")
  mkdir -p "$folder"
  [ -f "$folder/$1/done" ] || comparison present
  train_stage "$1" "$folder/$1" "$folder/$1.log" "${settings[@]}"
  comparison check --stage "$1"
}

evaluate() { # seed arm
  local folder
  folder=$(folder_of "$1" "$2")
  # shellcheck disable=SC2086 # several flags in one variable
  bash scripts/evaluate.sh "$folder/finetune" ${TASKS:+--tasks "$TASKS"} --output-dir "$folder/eval" $EVALUATE_FLAGS
}

# One command at a time, so that a finished one is not measured again; all of them for the first seed's arms.
analyze() { # command
  local arm models=() done="$OUTPUT/analysis/$1.done" stale=0
  for arm in "${arms[@]}"; do
    models+=("$arm=$(folder_of "${seeds[0]}" "$arm")/finetune")
    [ "$done" -nt "$(folder_of "${seeds[0]}" "$arm")/finetune/done" ] || stale=1
  done
  if [ -f "$done" ] && [ "$stale" -eq 0 ] && [ "$(cat "$done")" = "${models[*]}" ]; then
    echo "$OUTPUT/analysis/$1 is complete, skipped"
    return
  fi
  COMMANDS="$1" OUTPUT_DIR="$OUTPUT/analysis" bash scripts/analyze.sh "${models[@]}"
  echo "${models[*]}" >"$done"
}

upstream() {
  if [ -f "$OUTPUT/upstream/done" ]; then
    echo "$OUTPUT/upstream is complete, skipped"
    return
  fi
  # Its models and data are its own: LLaVA 1.2.2 cannot load the presets'.
  # shellcheck disable=SC2086 # several settings in one variable
  env -u MODEL_PATH -u VISION_TOWER -u MAX_STEPS -u PER_DEVICE_BATCH -u SEED -u BF16 -u MODEL_MAX_LENGTH -u TOLERANCE \
    -u GRADIENT_CHECKPOINTING ${UPSTREAM_SETTINGS:-} ARMS=none OUTPUT_DIR="$OUTPUT/upstream" bash scripts/upstream_baseline.sh
  touch "$OUTPUT/upstream/done"
}

comparison() { # check | present | report, more flags
  "$PYTHON_BIN" -m llava.eval.compare "$1" --output-dir "$OUTPUT" --arms "$ARMS" --seeds "$SEEDS" "${@:2}"
}

mkdir -p "$OUTPUT/analysis"
# A training that outlived this script keeps the lock: two would write into one folder.
exec 8>"$OUTPUT/.lock"
flock -w "${LOCK_SECONDS:-60}" 8 || die "$OUTPUT is in use by another comparison or by a training that it left; wait for its end"

step "set up .venv" ensure_environment
for name in "${PREPARE[@]}"; do step "prepare $name" "$PYTHON_BIN" -m playground "$name"; done
[ "$UPSTREAM" -eq 0 ] || step "upstream LLaVA, baseline" upstream
for seed in "${seeds[@]}"; do
  for arm in "${arms[@]}"; do
    step "stage 1, $arm, seed $seed" train pretrain "$seed" "$arm"
    step "stage 2, $arm, seed $seed" train finetune "$seed" "$arm"
    step "evaluation, $arm, seed $seed" evaluate "$seed" "$arm"
  done
done
for command in $ANALYSIS; do step "analysis, $command" analyze "$command"; done
step "report" comparison report
show_times
echo
echo "page: $OUTPUT/report.html   tables: $OUTPUT/report.md $OUTPUT/report-*.csv"
