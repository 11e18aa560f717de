#!/usr/bin/env bash
# Every measurement, table and figure of the paper for the given checkpoints. See
# docs/analysis.md.
#   bash scripts/analyze.sh [CKPT...]    folders or hub ids; NAME=CKPT also sets
#                                        the name in the figures (default:
#                                        outputs/quickstart/*/finetune)
#   OUTPUT_DIR=folder                    where everything goes (default:
#                                        outputs/analysis)
#   DATA=file-or-folder                  samples to measure on (default: the
#                                        playground's held-out scenes)
#   SAMPLES=1000                         number of samples (default: few, see each
#                                        command's --help)
#   COMMANDS="theory attention"          only these
# The flags --output-dir, --data, --samples and --commands mean the same. A
# command that fails is reported at the end; the others still run.
set -euo pipefail
# shellcheck source=scripts/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ -z "${SAMPLES:-}" ] || require_number SAMPLES 1
for word in "$@"; do # before the environment is made
  case ${word%%=*} in
    --output-dir | --data | --samples | --commands) ;;
    -*) die "$word is not a flag of this script; see --help" ;;
  esac
done
export EXTRAS="${EXTRAS:-analysis}"
ensure_environment
exec "$PYTHON_BIN" -m llava.analysis all ${OUTPUT_DIR:+--output-dir "$OUTPUT_DIR"} ${DATA:+--data "$DATA"} \
  ${SAMPLES:+--samples "$SAMPLES"} ${COMMANDS:+--commands "$COMMANDS"} "$@"
