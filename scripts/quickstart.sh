#!/usr/bin/env bash
# A real two-stage MLLM on two CPU cores: prepares a language model, a vision tower and pictures, trains the baseline and
# the aligned, compensated norm through both stages, and compares them on held-out pictures. About 16 minutes.
#   ARMS="none layernorm gwc_layernorm"   which arms to train (default: none gwc_layernorm)
#   OUTPUT_ROOT=folder                    where everything goes (default: outputs/quickstart)
# Finished steps are kept; a second call does only what is missing. Variables of scripts/pretrain.sh apply as well.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -eq 0 ] || die "$(basename "$0") takes no arguments, found: $*; it reads the variables that --help names"
: "${ARMS:=none gwc_layernorm}" "${OUTPUT_ROOT:=outputs/quickstart}"

TIMES=()

# Runs one step, shows what it prints, and remembers its time.
step() { # title command...
  local title="$1" start=$SECONDS
  shift
  printf '\n=== %s\n' "$title"
  "$@"
  TIMES+=("$(printf '%-44s %5d s' "$title" $((SECONDS - start)))")
}

show_times() {
  printf '\n=== time of each step\n'
  printf '%s\n' "${TIMES[@]}" "$(printf '%-44s %5d s' all "$SECONDS")"
}

train() { # stage arm
  "$PYTHON_BIN" -m llava.compare stage "$1" "$OUTPUT_ROOT/$2/$1" "$OUTPUT_ROOT/$2-$1.log" PRESET=demo NORM="$2" \
    PRETRAIN_ADAPTER="$OUTPUT_ROOT/$2/pretrain/mm_projector.bin" REPORT_TO="${REPORT_TO:-tensorboard}"
}

compare() {
  local arm arguments=()
  for arm in $ARMS; do arguments+=(--arm "$arm" "$OUTPUT_ROOT/$arm/pretrain" "$OUTPUT_ROOT/$arm/finetune"); done
  "$PYTHON_BIN" -m playground compare "${arguments[@]}" --data playground/data/scenes --output-dir "$OUTPUT_ROOT"
}

mkdir -p "$OUTPUT_ROOT"
step "set up .venv" ensure_environment
step "language model SmolLM2-135M-Instruct" "$PYTHON_BIN" -m playground smollm2
step "pictures with captions and questions" "$PYTHON_BIN" -m playground scenes
step "vision tower (SigLIP, sigmoid contrastive)" "$PYTHON_BIN" -m playground tower
for arm in $ARMS; do
  step "stage 1, $arm" train pretrain "$arm"
  step "stage 2, $arm" train finetune "$arm"
done
step "answers to held-out questions" compare

show_times
cat <<END

=== where everything is
  table, results     $OUTPUT_ROOT/table.md  $OUTPUT_ROOT/results.json
  figures            $OUTPUT_ROOT/norms.png  $OUTPUT_ROOT/examples.png
  checkpoints        $OUTPUT_ROOT/<arm>/{pretrain,finetune}
  training logs      $OUTPUT_ROOT/<arm>/<stage>/train_log.jsonl  (tensorboard --logdir $OUTPUT_ROOT)
  inputs             playground/data

=== measure both arms: every table and figure of the paper (docs/analysis.md)
  bash scripts/analyze.sh

=== talk to a model (about 256 tokens long; docs/evaluate.md)
  $PYTHON_BIN -m llava.serve.cli --model-path $OUTPUT_ROOT/${ARMS##* }/finetune \\
    --image-file playground/data/scenes/images/heldout_00000.png
END
