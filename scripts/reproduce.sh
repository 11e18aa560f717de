#!/usr/bin/env bash
# A table or figure of the paper: fetches or trains what it needs, measures it,
# and writes one page with the paper's numbers, ours and the difference.
#   bash scripts/reproduce.sh table1 [--dry-run]
#       one of table1 to table6, fig2 to fig5, appendix-g and theory
#   --dry-run               what would be fetched, trained and run, its size, and
#                           what is missing
#   --samples N             samples to measure on (default: the paper's 1000);
#                           the variable SAMPLES means the same
#   --data PATH             samples from here (default: MMBench, POPE, MM-Star);
#                           the variable DATA means the same
#   --model NAME=PATH       take a published model from a folder, NAME as in the
#                           dry run; may be repeated
#   --preset NAME           train the arms by this preset (default: the paper's)
#   --output-dir DIR        default: outputs/reproduce; the arms are trained in
#                           compare-PRESET next to it
# Variables of scripts/pretrain.sh and finetune.sh apply to every training, or
# are refused by name; EVALUATE_FLAGS="--limit 20" goes to evaluate.sh. Rerun the
# same command to resume. See docs/analysis.md.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
run_experiment reproduce ${DATA:+--data "$DATA"} ${SAMPLES:+--samples "$SAMPLES"} "$@"
