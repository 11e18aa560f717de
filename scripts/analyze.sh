#!/usr/bin/env bash
# Every measurement, table and figure of the paper for the given checkpoints (docs/analysis.md); --help lists the flags.
# The variables OUTPUT_DIR, DATA, SAMPLES and COMMANDS mean the same.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${EXTRAS:=analysis}"
run_module llava.analysis all ${OUTPUT_DIR:+--output-dir "$OUTPUT_DIR"} ${DATA:+--data "$DATA"} \
  ${SAMPLES:+--samples "$SAMPLES"} ${COMMANDS:+--commands "$COMMANDS"} "$@"
