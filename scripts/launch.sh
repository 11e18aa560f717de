# shellcheck shell=bash
# What the training scripts share: preset, devices, batch arithmetic, launch command, dry run. Sourced after STAGE is set.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ENTRY=llava/train/train_mem.py
readonly NORMS="none layernorm gwc_layernorm rmsnorm gwc_rmsnorm"
ARGS=()        # the trainer's flags
LAUNCH=()      # what starts the trainer: environment, launcher and the launcher's options
MISSING=0      # inputs that check_inputs did not find
DATA_SOURCE="" # where the stage's data comes from
INPUT_HINT=""  # how a preset's inputs are prepared, where one command does it

# ---- preset and defaults: the environment wins over the preset, the preset over the recipe ---------------------------

load_preset() {
  local names
  : "${PRESET:=llama-3.2-3b}" "${NORM:=gwc_layernorm}"
  names=$(basename -s .sh scripts/presets/*.sh | xargs)
  require_one_of PRESET "$names"
  require_one_of NORM "$NORMS"
  # shellcheck source=/dev/null
  source "scripts/presets/$PRESET.sh"
}

# The recipe's values that both stages share (paper, section E).
set_common_defaults() {
  : "${VISION_TOWER:=google/siglip-so400m-patch14-384}" "${LABEL_MASKING:=upstream}"
  : "${EPOCHS:=1}" "${MAX_STEPS:=-1}" "${SEED:=42}"
  : "${ACTIVATION_CHECKPOINTING:=${GRADIENT_CHECKPOINTING:-auto}}" # the older name, of LLaVA's scripts, still counts
  : "${NUM_WORKERS:=4}" "${REPORT_TO:=tensorboard}" "${SAVE_STRATEGY:=steps}" "${SAVE_STEPS:=1000}" "${SAVE_TOTAL_LIMIT:=1}"
  : "${DEEPSPEED_CONFIG=deepspeed_configs/zero3.json}" # an empty value means: without DeepSpeed
  : "${OUTPUT_DIR:=checkpoints/$PRESET-$NORM-$STAGE}"
  : "${RUN_NAME:=$(basename "$OUTPUT_DIR")}"
}

# ---- devices and batch -------------------------------------------------------------------------------------------------

count_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cvE '^(-1)?$' || true
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  else
    find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l # a container may have the devices without the tool
  fi
}

# Nodes and GPUs per node from lines like "host slots=8".
read_hostfile() {
  if [ ! -f "$HOSTFILE" ]; then
    [ -n "${NNODES:-}" ] && [ -n "${NUM_GPUS:-}" ] && return # enough for a dry run, which lists it as missing
    die "HOSTFILE=$HOSTFILE does not exist; give a file with lines 'host slots=8'"
  fi
  local slots
  slots=$(sed -nE 's/^[^#]*[[:space:]]slots=([0-9]+).*/\1/p' "$HOSTFILE")
  [ -n "$slots" ] || die "HOSTFILE=$HOSTFILE has no line 'host slots=8'"
  : "${NNODES:=$(wc -l <<<"$slots")}"
  if [ -z "${NUM_GPUS:-}" ]; then
    [ "$(sort -u <<<"$slots" | wc -l)" -eq 1 ] ||
      die "HOSTFILE=$HOSTFILE has hosts with different slots; set NUM_GPUS to what each node shall use"
    NUM_GPUS=$(head -n 1 <<<"$slots")
  fi
}

resolve_devices() {
  [ -z "${HOSTFILE:-}" ] || read_hostfile
  : "${NNODES:=1}" "${NUM_GPUS:=$(count_gpus)}" "${CPU_RANKS:=1}" "${MAX_RESTARTS:=0}"
  require_number MAX_RESTARTS 0
  require_number NNODES 1
  require_number NUM_GPUS 0
  require_number CPU_RANKS 1
  if [ "$NUM_GPUS" -gt 0 ]; then
    RANKS=$NUM_GPUS DEVICE_KIND="NUM_GPUS"
  else
    RANKS=$CPU_RANKS DEVICE_KIND="CPU_RANKS"
  fi
  DEVICES=$((NNODES * RANKS))
  : "${TF32:=$([ "$NUM_GPUS" -gt 0 ] && echo True || echo False)}"
  # A CPU without instructions for bf16 computes in it several times more slowly than in fp32.
  : "${BF16:=$([ "$NUM_GPUS" -gt 0 ] || grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null && echo True || echo False)}"
}

divisors() {
  local n
  for ((n = 1; n <= $1; n++)); do [ $(($1 % n)) -ne 0 ] || printf '%d ' "$n"; done
}

# Keeps GLOBAL_BATCH for any number of devices: accumulation = GLOBAL_BATCH / (PER_DEVICE_BATCH x devices).
resolve_batch() {
  require_number GLOBAL_BATCH 1
  if [ "$PER_DEVICE_BATCH" = auto ]; then # a device's whole share at once
    PER_DEVICE_BATCH=$((GLOBAL_BATCH % DEVICES == 0 ? GLOBAL_BATCH / DEVICES : 1))
  fi
  require_number PER_DEVICE_BATCH 1
  local micro=$((PER_DEVICE_BATCH * DEVICES)) counts="none" per_device="none, $GLOBAL_BATCH is no multiple of $DEVICES"
  ACCUMULATION=$((GLOBAL_BATCH / micro))
  [ $((ACCUMULATION * micro)) -ne "$GLOBAL_BATCH" ] || return 0
  [ $((GLOBAL_BATCH % PER_DEVICE_BATCH)) -ne 0 ] || counts=$(divisors $((GLOBAL_BATCH / PER_DEVICE_BATCH)))
  [ $((GLOBAL_BATCH % DEVICES)) -ne 0 ] || per_device=$(divisors $((GLOBAL_BATCH / DEVICES)))
  die "GLOBAL_BATCH=$GLOBAL_BATCH is no multiple of $micro = NNODES=$NNODES x $DEVICE_KIND=$RANKS x PER_DEVICE_BATCH=$PER_DEVICE_BATCH.
Change one of them:
  NNODES x $DEVICE_KIND   ${counts% }
  PER_DEVICE_BATCH    ${per_device% }
  GLOBAL_BATCH        a multiple of $micro, such as $(((ACCUMULATION + 1) * micro)) (another batch than the recipe's)"
}

# ---- launch ------------------------------------------------------------------------------------------------------------

# The first free port from one that differs between jobs started side by side on a machine.
free_port() {
  local port=$((29500 + $$ % 500))
  while (exec 8<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
  echo "$port"
}

choose_launcher() {
  : "${LAUNCHER:=auto}"
  require_one_of LAUNCHER "auto python deepspeed torchrun"
  [ "$MAX_RESTARTS" -eq 0 ] || [[ -z "${HOSTFILE:-}" && "$LAUNCHER" =~ ^(auto|torchrun)$ ]] ||
    die "MAX_RESTARTS=$MAX_RESTARTS needs LAUNCHER=torchrun and no HOSTFILE: other launchers start a rank only once"
  [ "$LAUNCHER" = auto ] || return 0
  if [ "$MAX_RESTARTS" -gt 0 ]; then
    LAUNCHER=torchrun
  elif [ -n "${HOSTFILE:-}" ]; then
    LAUNCHER=deepspeed
  elif [ "$NNODES" -gt 1 ]; then
    LAUNCHER=torchrun
  elif [ "$DEVICES" -eq 1 ] && [ -z "$DEEPSPEED_CONFIG" ]; then
    LAUNCHER=python
  elif [ "$NUM_GPUS" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    LAUNCHER=torchrun # deepspeed --num_gpus would ignore the variable and take the first GPUs
  else
    LAUNCHER=deepspeed
  fi
}

add_torchrun_options() {
  if [ "$NNODES" -eq 1 ]; then
    LAUNCH+=(--standalone --nproc_per_node "$RANKS")
    [ "$MAX_RESTARTS" -eq 0 ] || LAUNCH+=(--max_restarts "$MAX_RESTARTS")
    return
  fi
  : "${NODE_RANK:=${SLURM_NODEID:-}}" "${MASTER_PORT:=29500}"
  [ -z "$NODE_RANK" ] || require_number NODE_RANK 0
  LAUNCH+=(--nnodes "$NNODES" --nproc_per_node "$RANKS")
  if [ "$MAX_RESTARTS" -gt 0 ]; then # nodes find each other again after a restart, whatever their numbers were
    LAUNCH+=(--max_restarts "$MAX_RESTARTS" --rdzv_backend c10d --rdzv_id "${RDZV_ID:-${SLURM_JOB_ID:-$RUN_NAME}}"
      --rdzv_endpoint "${MASTER_ADDR:-MASTER_ADDR}:$MASTER_PORT")
    # Without a number torchrun guesses by host name which node is the endpoint.
    [ -z "$NODE_RANK" ] || LAUNCH+=(--rdzv_conf "is_host=$((NODE_RANK == 0))")
  else
    LAUNCH+=(--node_rank "${NODE_RANK:-NODE_RANK}" --master_addr "${MASTER_ADDR:-MASTER_ADDR}" --master_port "$MASTER_PORT")
  fi
}

resolve_launch() {
  local environment=()
  choose_launcher
  [ -z "${LLAVA_PYTHON:-}" ] || environment+=("PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}")
  if [ "$NUM_GPUS" -eq 0 ]; then
    # The Trainer joins CPU ranks only under DeepSpeed; otherwise each would quietly train a model of its own.
    [ "$DEVICES" -eq 1 ] || [ -n "$DEEPSPEED_CONFIG" ] ||
      die "$DEVICES CPU ranks need DeepSpeed; set DEEPSPEED_CONFIG to one of: $(echo deepspeed_configs/*.json), or CPU_RANKS=1"
    local threads=$(($(nproc) / RANKS))
    environment+=("CUDA_VISIBLE_DEVICES=" "DS_ACCELERATOR=cpu" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}")
  elif [ "$LAUNCHER" = python ]; then
    local visible="${CUDA_VISIBLE_DEVICES:-0}"
    environment+=("CUDA_VISIBLE_DEVICES=${visible%%,*}") # with more in sight the Trainer would use DataParallel
  fi
  # In the store that torchrun shares with its ranks a restarted rank finds the addresses of dead ones (pytorch#135712).
  [ "$MAX_RESTARTS" -eq 0 ] || environment+=("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
  [ ${#environment[@]} -eq 0 ] || LAUNCH=(env "${environment[@]}")
  case $LAUNCHER in
    python)
      [ "$DEVICES" -eq 1 ] || die "LAUNCHER=python runs one process, not NNODES=$NNODES x $DEVICE_KIND=$RANKS"
      [ -z "$DEEPSPEED_CONFIG" ] || die "LAUNCHER=python cannot start DeepSpeed; set DEEPSPEED_CONFIG= or LAUNCHER=deepspeed"
      LAUNCH+=("$PYTHON_BIN")
      ;;
    deepspeed)
      LAUNCH+=("$PYTHON_BIN" -m deepspeed.launcher.runner) # what the deepspeed program runs
      if [ -n "${HOSTFILE:-}" ]; then
        LAUNCH+=(--hostfile "$HOSTFILE" --num_nodes "$NNODES" --num_gpus "$NUM_GPUS")
        [ -z "${MASTER_ADDR:-}" ] || LAUNCH+=(--master_addr "$MASTER_ADDR")
        [ -z "${MASTER_PORT:-}" ] || LAUNCH+=(--master_port "$MASTER_PORT")
      else
        [ "$NNODES" -eq 1 ] || die "LAUNCHER=deepspeed with NNODES=$NNODES needs HOSTFILE; or use LAUNCHER=torchrun"
        [ "$NUM_GPUS" -eq 0 ] || [ -z "${CUDA_VISIBLE_DEVICES:-}" ] ||
          die "deepspeed --num_gpus ignores CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES; unset it or use LAUNCHER=torchrun"
        LAUNCH+=("$([ "$NUM_GPUS" -gt 0 ] && echo --num_gpus || echo --num_accelerators)" "$RANKS")
        LAUNCH+=(--master_port "${MASTER_PORT:-$(free_port)}")
      fi
      ;;
    torchrun)
      LAUNCH+=("$PYTHON_BIN" -m torch.distributed.run) # what the torchrun program runs
      add_torchrun_options
      ;;
  esac
}

# ---- the trainer's flags -----------------------------------------------------------------------------------------------

flag() { # --name value: left out when the value is empty
  [ -z "$2" ] || ARGS+=("$1" "$2")
}

add_common_flags() {
  flag --model_name_or_path "$MODEL_PATH"
  flag --version "$PROMPT_VERSION"
  flag --data_path "$DATA_PATH"
  flag --image_folder "$IMAGE_FOLDER"
  flag --attn_implementation "${ATTN_IMPLEMENTATION:-}"
  flag --image_aspect_ratio square # plain resize to the tower's input size
  flag --vision_tower "$VISION_TOWER"
  flag --mm_vision_select_layer -2
  flag --mm_vision_select_feature patch
  flag --mm_projector_type mlp2x_gelu
  flag --mm_projector_norm "$NORM"
  flag --mm_projector_norm_init "${NORM_INIT:-}"
  flag --mm_use_im_start_end False
  flag --mm_use_im_patch_token False
  flag --label_masking "$LABEL_MASKING"
  flag --lazy_preprocess True
  flag --model_max_length "$MODEL_MAX_LENGTH"
  flag --deepspeed "$DEEPSPEED_CONFIG"
  flag --bf16 "$BF16"
  flag --tf32 "$TF32"
  flag --activation_checkpointing "$ACTIVATION_CHECKPOINTING"
  flag --per_device_train_batch_size "$PER_DEVICE_BATCH"
  flag --gradient_accumulation_steps "$ACCUMULATION"
  flag --max_tokens_per_micro_batch "${MAX_TOKENS_PER_MICRO_BATCH:-}"
  flag --optim "${OPTIM:-}"
  flag --learning_rate "$LEARNING_RATE"
  flag --lr_scheduler_type cosine
  flag --warmup_ratio 0.03
  flag --weight_decay 0.0
  flag --num_train_epochs "$EPOCHS"
  flag --max_steps "$MAX_STEPS"
  flag --seed "$SEED"
  flag --dataloader_num_workers "$NUM_WORKERS"
  flag --logging_steps 1
  flag --report_to "$REPORT_TO"
  flag --run_name "$RUN_NAME"
  flag --save_strategy "$SAVE_STRATEGY"
  flag --save_steps "$SAVE_STEPS"
  flag --save_total_limit "$SAVE_TOTAL_LIMIT"
  flag --output_dir "$OUTPUT_DIR"
}

# Flags that the scripts compute with come from the environment alone, else table, folder and command would disagree.
refuse_owned_flags() {
  local word owned
  for word in "$@"; do
    for owned in output_dir:OUTPUT_DIR deepspeed:DEEPSPEED_CONFIG per_device_train_batch_size:PER_DEVICE_BATCH \
      gradient_accumulation_steps:GLOBAL_BATCH mm_projector_norm:NORM; do
      [ "${word%%=*}" != "--${owned%%:*}" ] || die "--${owned%%:*} is set by the script; use ${owned#*:}= in the environment"
    done
  done
}

# The value that the trainer will see: the last one given, whether by the script or by the caller's extra flags.
value_of() {
  local i value=""
  for ((i = 0; i < ${#ARGS[@]}; i++)); do
    case "${ARGS[i]}" in
      "$1") value="${ARGS[i + 1]-}" ;;
      "$1="*) value="${ARGS[i]#*=}" ;;
    esac
  done
  printf '%s' "$value"
}

# ---- what is shown before a run ----------------------------------------------------------------------------------------

row() { [ -z "$2" ] || printf '  %-20s %s\n' "$1" "$2"; }

count_of() { [ "$1" -eq 1 ] && echo "$1 $2" || echo "$1 $2s"; } # number noun

show_configuration() {
  local unit="GPU" trained length max_steps
  [ "$NUM_GPUS" -gt 0 ] || unit="CPU rank"
  trained=$(value_of --mm_tunable_parts)
  max_steps=$(value_of --max_steps)
  length="$(value_of --num_train_epochs) epoch(s)"
  [[ ! "$max_steps" =~ ^[1-9] ]] || length=$(count_of "$max_steps" step)
  echo "configuration"
  row stage "$STAGE"
  row preset "$PRESET"
  row "arm (NORM)" "$NORM${NORM_INIT:+, initial norm $NORM_INIT}"
  row trains "${trained:-mm_mlp_adapter}"
  row "LoRA rank" "$(value_of --lora_r)"
  row devices "$DEVICES = $(count_of "$NNODES" node) x $(count_of "$RANKS" "$unit")"
  row "per-device batch" "$PER_DEVICE_BATCH"
  row accumulation "$ACCUMULATION"
  row "global batch" "$GLOBAL_BATCH = $DEVICES x $PER_DEVICE_BATCH x $ACCUMULATION"
  row "micro-batch tokens" "$(value_of --max_tokens_per_micro_batch)"
  row "learning rate" "$(value_of --learning_rate)"
  row "  projector" "$(value_of --mm_projector_lr)"
  row "  vision tower" "$(value_of --mm_vision_tower_lr)"
  row length "$length"
  row "max. tokens" "$(value_of --model_max_length)"
  row model "$(value_of --model_name_or_path)"
  row "vision tower" "$(value_of --vision_tower)"
  row data "$(value_of --data_path)"
  row images "$(value_of --image_folder)"
  row adapter "$(value_of --pretrain_mm_mlp_adapter)"
  row launcher "$LAUNCHER"
  row deepspeed "${DEEPSPEED_CONFIG:-none}"
  row output "$OUTPUT_DIR"
}

quoted() { # word: as a shell reads it back, plain where nothing needs quoting
  if [[ "$1" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then printf '%s' "$1"; else printf '%q' "$1"; fi
}

# The whole command, one flag per line.
print_command() {
  local word
  for word in "${LAUNCH[@]}"; do
    quoted "$word"
    printf ' '
  done
  quoted "$ENTRY"
  for word in "${ARGS[@]}"; do
    [[ "$word" == --* ]] && printf ' \\\n  ' || printf ' '
    quoted "$word"
  done
  echo
}

report() { # state what value [what to do]
  printf '  %-8s %-14s %s\n' "$1" "$2" "$3"
  if [ "$1" = MISSING ]; then
    MISSING=$((MISSING + 1))
    printf '  %-8s %-14s -> %s\n' "" "" "$4"
  fi
}

check_file() { # what path what-to-do
  if [ -z "$2" ]; then return; fi
  if [ -e "$2" ]; then report found "$1" "$2"; else report MISSING "$1" "$2" "$3"; fi
}

check_data() { # files, folders or patterns, separated by commas; what-to-do
  local parts part
  IFS=, read -ra parts <<<"$1"
  for part in "${parts[@]}"; do
    if [ ! -e "$part" ] && compgen -G "$part" >/dev/null; then
      report found data "$part"
    else
      check_file data "$part" "$2"
    fi
  done
}

# A name like "owner/model" that is neither here nor under a folder that is here belongs to the model hub.
check_model() { # what name what-to-do
  if [ ! -e "$2" ] && [ ! -d "${2%%/*}" ] && [[ "$2" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$ ]]; then
    report hub "$1" "$2"
  else
    check_file "$1" "$2" "$3"
  fi
}

check_inputs() {
  echo "inputs"
  check_model model "$(value_of --model_name_or_path)" "${INPUT_HINT:-set MODEL_PATH to a model folder or a hub name}"
  check_model "vision tower" "$(value_of --vision_tower)" "${INPUT_HINT:-set VISION_TOWER to a model folder or a hub name}"
  check_data "$(value_of --data_path)" "${INPUT_HINT:-$DATA_SOURCE, or set DATA_PATH}"
  check_file images "$(value_of --image_folder)" "${INPUT_HINT:-$DATA_SOURCE, or set IMAGE_FOLDER}"
  check_file adapter "$(value_of --pretrain_mm_mlp_adapter)" \
    "run scripts/pretrain.sh with the same PRESET and NORM first, or set PRETRAIN_ADAPTER"
  check_file deepspeed "$DEEPSPEED_CONFIG" "set DEEPSPEED_CONFIG to one of: $(echo deepspeed_configs/*.json)"
  check_file hostfile "${HOSTFILE:-}" "write lines 'host slots=8'"
  if [ "$LAUNCHER" = torchrun ] && [ "$NNODES" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] || report MISSING MASTER_ADDR "not set" "set it to the first node's address, the same on every node"
    [ -n "${NODE_RANK:-}" ] || [ "$MAX_RESTARTS" -gt 0 ] || report MISSING NODE_RANK "not set" "set it to 0 on the first node, 1 on the next, ..."
  fi
}

# Shows everything, then trains unless DRY_RUN is set. Takes the caller's extra flags.
run_stage() {
  refuse_owned_flags "$@"
  ARGS+=("$@")
  show_configuration
  echo "command"
  print_command | sed 's/^/  /'
  check_inputs
  if is_on "${DRY_RUN:-}"; then
    echo "dry run: nothing was installed or started"
    return
  fi
  [ "$MISSING" -eq 0 ] || die "$MISSING input(s) are MISSING, see the list above"
  if is_on "${CHECK:-}"; then ENTRY=llava/train/launch_check.py; fi # the launch alone: nodes, links, paths
  ensure_environment
  mkdir -p "$OUTPUT_DIR"
  if [ "${NODE_RANK:-0}" = 0 ]; then
    { printf '#!/usr/bin/env bash\ncd %q || exit\n' "$ROOT" && print_command; } >"$OUTPUT_DIR/command.sh"
  fi
  run_trainer
}

# ---- the run itself: signals go to the ranks, and the first error is shown last ----------------------------------------

# Exits with the launcher's code, or with 85 where a signal ended the run after a save: start it again.
run_trainer() {
  local code=0 launcher
  LLAVA_RUN_DIR=$(mktemp -d) # the ranks of this node write their process ids there
  export LLAVA_RUN_DIR
  [ "${NODE_RANK:-0}" != 0 ] || rm -rf "$OUTPUT_DIR/errors"
  # A process group of its own, so that a signal to this script reaches the launcher only through the traps. Launchers
  # end all ranks on SIGTERM and die of SIGUSR1; the ranks themselves save first.
  set -m
  (trap '' USR1 && exec "${LAUNCH[@]}" "$ENTRY" "${ARGS[@]}") &
  launcher=$!
  set +m
  trap 'stop_ranks "$launcher"' TERM USR1
  trap 'kill -INT -- "-$launcher"' INT
  wait "$launcher" || code=$?
  while kill -0 "$launcher" 2>/dev/null; do # a trap ended the wait
    code=0
    wait "$launcher" || code=$?
  done
  trap - TERM USR1 INT
  if [ -e "$LLAVA_RUN_DIR/requeue" ]; then code=85; fi
  case $code in 0 | 85) ;; *) show_first_error ;; esac
  rm -rf "$LLAVA_RUN_DIR"
  exit "$code"
}

stop_ranks() { # launcher's process id
  local file found=""
  for file in "$LLAVA_RUN_DIR"/*.pid; do
    if [ -e "$file" ] && kill -USR1 "$(<"$file")" 2>/dev/null; then found=1; fi
  done
  if [ -n "$found" ]; then
    echo "signal received: the ranks save after the current step and stop" >&2
  else # nothing is trained yet
    touch "$LLAVA_RUN_DIR/requeue"
    kill -TERM -- "-$1"
  fi
}

# Reports sort by progress, then by whether a rank only lost its peers, then by time (llava/train/failures.py).
show_first_error() {
  local reports=("$OUTPUT_DIR"/errors/*.txt) file rank
  [ -e "${reports[0]}" ] || reports=()
  if [ ${#reports[@]} -eq 0 ] || [[ "${reports[0]##*/}" =~ ^[0-9]+-[0-9]+-1- ]]; then
    for file in "$LLAVA_RUN_DIR"/*.pid; do
      rank=$(basename "$file" .pid)
      if [ -e "$file" ] && ! compgen -G "$OUTPUT_DIR/errors/*-rank$rank.txt" >/dev/null; then
        echo "rank $rank on $(hostname), process $(<"$file"), ended without a message: it was killed, by hand or for want of memory" >&2
        return
      fi
    done
  fi
  [ ${#reports[@]} -eq 0 ] || { echo "the first error, of ${#reports[@]} in $OUTPUT_DIR/errors:" && cat "${reports[0]}"; } >&2
}
