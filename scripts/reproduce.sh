#!/usr/bin/env bash
# A table or figure of the paper: fetches or trains what it needs, measures it, and writes one page:
#   bash scripts/reproduce.sh table1 [--dry-run]
# --help lists the flags; docs/analysis.md has the variables.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${EXTRAS:=train,playground,eval,analysis}"
run_module llava.compare reproduce ${DATA:+--data "$DATA"} ${SAMPLES:+--samples "$SAMPLES"} "$@"
