#!/usr/bin/env bash
# Trains several arms with the same data, initial weights and budget, scores them, and writes one page with a verdict:
#   bash scripts/compare.sh --preset demo --seeds 3
# --help lists the flags; docs/compare.md has the variables.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${EXTRAS:=train,playground,eval,analysis}"
run_module llava.compare run "$@"
