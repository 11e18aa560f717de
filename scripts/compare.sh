#!/usr/bin/env bash
# Trains several arms with the same data, initial weights and budget, scores them,
# and writes one page with a verdict.
#   bash scripts/compare.sh --preset demo --seeds 2
#       SmolLM2-135M on drawn scenes, half an hour on two CPU cores
#   bash scripts/compare.sh --preset llama-3.2-3b
#       the paper's recipe and its nine benchmarks
#   --preset NAME               a preset of scripts/presets
#   --seeds N | --seeds 1,2     how many seeds (42, 43, ...; default 1), or which
#                               ones
#   --arms a,b                  from none, layernorm, gwc_layernorm (default:
#                               these), layernorm@default (initial gain 1),
#                               gwc_layernorm@4x (initial norm four times that of
#                               text), ...
#   --tasks a,b                 tasks of scripts/evaluate.sh (default: the paper's
#                               nine; demo: scenes)
#   --questions FILE            own questions with their answers, also answered by
#                               every run and scored (docs/evaluate.md)
#   --question-images DIR       folder or zip file of their pictures (default: the
#                               repository's root)
#   --plan FILE                 train a committed plan, seed by seed; it decides
#                               the flags above
#   --output-dir DIR            default: outputs/compare-<preset>
# Variables of scripts/pretrain.sh and finetune.sh apply to every run, or are
# refused by name. EVALUATE_FLAGS="--limit 20" goes to evaluate.sh,
# ANALYSIS="update-rates attention" chooses commands of scripts/analyze.sh, which
# also takes DATA and SAMPLES. Finished steps are kept; rerun the same command
# after an interruption to resume. See docs/compare.md.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
run_experiment run "$@"
