# shellcheck shell=bash
# Long work in steps, each with its time; a finished stage of training is never done again. Sourced after lib.sh.

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

# One stage of one run, skipped when its folder is complete. Training's own messages go to a file.
train_stage() { # stage folder log NAME=VALUE...
  local stage="$1" folder="$2" log="$3"
  if [ -f "$folder/done" ] && compgen -G "$folder/model*.safetensors" >/dev/null; then
    echo "$folder is complete, skipped (remove it to train again)"
    return
  fi
  echo "log: $log"
  rm -f "$folder/done"
  env "${@:4}" OUTPUT_DIR="$folder" bash "scripts/$stage.sh" >"$log" 2>&1 &
  # Ctrl-C does not reach what runs in the background: end it with this script.
  # shellcheck disable=SC2064 # the number of this process
  trap "kill $! 2>/dev/null || true" EXIT
  watch_training $! "$folder/train_log.jsonl" || { tail -n 30 "$log" >&2; die "$stage failed, see $log"; }
  trap - EXIT
  touch "$folder/done"
}

# Shows the newest optimizer step every few seconds until the process ends; returns its exit status.
watch_training() { # pid jsonl
  local line before pattern='.*"step": ([0-9]+), "loss": ([0-9.]+).*"samples_per_second": ([0-9.]+).*'
  before=$(tail -n 1 "$2" 2>/dev/null || true) # of an earlier, interrupted run
  while kill -0 "$1" 2>/dev/null; do
    sleep "${WATCH_SECONDS:-3}"
    line=$(tail -n 1 "$2" 2>/dev/null || true)
    [[ "$line" = "$before" || ! "$line" =~ $pattern ]] ||
      printf '\r  step %4d  loss %.3f  %4.1f samples/s ' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[3]}"
  done
  echo
  wait "$1"
}
