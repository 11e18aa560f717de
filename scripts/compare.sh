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
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/compare.sh && exit ;; esac

python=$(plain_python) || exit
export PYTHON_BIN
exec "$python" -m llava.compare run "$@"
