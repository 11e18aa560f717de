#!/usr/bin/env bash
# Runs every part of the tests, or those that are named, each in the environment that it needs, and prints one table.
# Exits with 1 if a part failed. suite is scripts/test.sh; numeric repeats the tests with that mark on the instructions of
# one older CPU; chaos breaks real runs; browser gets an older Pillow; serving asks a quickstart's checkpoints
# through vLLM; peers trains with each tool of benchmarks/vs_peers.py.
# OUTPUT_DIR (default: outputs/test_all) gets the logs.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
readonly PARTS="suite numeric chaos browser serving peers"
parts=()
for part in "$@"; do
  [[ " $PARTS " == *" $part "* ]] || die "$part is not one of: $PARTS"
done
: "${OUTPUT_DIR:=outputs/test_all}"
export EXTRAS="${EXTRAS:-train,playground,dev,eval,analysis,trl}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ensure_environment
mkdir -p "$OUTPUT_DIR"

# Bash does not stop at a command that fails in a function whose status is asked for, so `&&` joins all commands below.
on_instructions() { # PyTorch's name of them, oneDNN's
  ATEN_CPU_CAPABILITY=$1 ONEDNN_MAX_CPU_ISA=$2 OMP_NUM_THREADS=1 \
    "$PYTHON_BIN" -m pytest -n 2 --dist loadfile -m numeric tests/model tests/train/test_masters.py tests/upstream
}

# pytest in an environment with the Pillow that Gradio needs, made once for each state of the requirements.
with_older_pillow() { # tests
  local python=.venv-pillow12/bin/python stamp
  stamp=$(cat pyproject.toml constraints.txt scripts/test_all.sh | sha256sum)
  if [ "$(cat .venv-pillow12/stamp 2>/dev/null)" != "$stamp" ]; then
    "${PYTHON:-python3}" -m venv --clear .venv-pillow12 &&
      "$python" -m pip install -q "$(grep '^torch==' constraints.txt)" &&
      "$python" -m pip install -q -c <(grep -v '^pillow==' constraints.txt) \
        -e ".[train,playground,dev,web]" playwright &&
      echo "$stamp" >.venv-pillow12/stamp || return
  fi
  "$python" -m pytest "$@"
}

run() { # part
  case $1 in
    suite) FAMILIES=all bash scripts/test.sh ;;
    numeric) # the suite has this CPU's own instructions
      if grep -qm1 avx512f /proc/cpuinfo; then on_instructions avx2 AVX2; else on_instructions default SSE41; fi
      ;;
    chaos) bash tests/nightly/chaos/run.sh ;;
    browser) with_older_pillow tests/eval/test_web.py ;;
    serving)
      { [ -d outputs/quickstart/none/finetune ] || bash scripts/quickstart.sh; } &&
        bash tests/nightly/serving/run.sh --questions 40 --output-dir "$OUTPUT_DIR/serving"
      ;;
    peers)
      # TRL is no peer there; tests/nightly/test_elsewhere.py trains by it.
      "$PYTHON_BIN" -c 'from benchmarks.vs_peers import Way, ensure_environment as make; make(Way("trl", 1).python.parents[1], "trl")' &&
        "$PYTHON_BIN" -m benchmarks.vs_peers --size tiny --repeats 1 --output-dir "$OUTPUT_DIR/peers" &&
        "$PYTHON_BIN" -m pytest tests/nightly/test_elsewhere.py
      ;;
  esac
}

# What a log says of its tests, for the table: pytest's last line, or that of the table of faults.
figures() { grep -E '^=* ?[0-9]+ (passed|failed|skipped|faults)' "$1" | tail -n 2 | tr -d '=' | xargs || true; }

[ $# -gt 0 ] || read -ra parts <<<"$PARTS"
status=0 table=""
for part in "$@" "${parts[@]}"; do
  log="$OUTPUT_DIR/$part.log" start=$SECONDS result=passed
  printf 'running %s, log in %s\n' "$part" "$log"
  run "$part" >"$log" 2>&1 </dev/null || { result=FAILED && status=1; }
  table+=$(printf '%-10s %-8s %6s  %s' "$part" "$result" "$((SECONDS - start)) s" "$(figures "$log")")$'\n'
done
printf '%s' "$table" | tee "$OUTPUT_DIR/table.txt"
exit "$status"
