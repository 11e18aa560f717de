# shellcheck shell=bash disable=SC2034
# What every script needs: the repository root as working directory, where relative paths start, and the Python to use.

CALLED_FROM=$PWD
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# In an installed package, where llava-recipe calls the recipes, relative paths mean the caller's.
if [[ "$ROOT" != */llava/recipes ]]; then
  cd "$ROOT" || exit 1
elif [ -z "${LLAVA_PYTHON:-}" ]; then
  die "$0 lies in an installed package; call it as: llava-recipe $(basename "$0" .sh)"
fi

is_on() { [[ ! "${1:-0}" =~ ^(0|[Nn][Oo]?|[Ff]|[Ff][Aa][Ll][Ss][Ee]|[Oo][Ff][Ff])$ ]]; }

require_one_of() { [[ " $2 " == *" ${!1} "* ]] || die "$1=${!1} is not one of: $2"; } # NAME "allowed values"

# A Python for what needs no package: the machine's, or else that of the environment.
plain_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" .venv/bin/python "${LLAVA_PYTHON:-python3}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate" && return; fi
  done
  die "${PYTHON:-python3} is not a Python of at least 3.11; set PYTHON to a newer Python"
}

# .venv of this repository, or the caller's own environment by LLAVA_PYTHON.
PYTHON_BIN=.venv/bin/python
if [ -n "${LLAVA_PYTHON:-}" ]; then
  PYTHON_BIN=$(command -v "$LLAVA_PYTHON") || die "LLAVA_PYTHON=$LLAVA_PYTHON is not a program"
fi

# C++ ops that DeepSpeed builds on first use go into .venv: in the home folder two environments would overwrite each
# other's. llava/launch/supervise.py has what happens when a build is killed.
[ -n "${LLAVA_PYTHON:-}" ] || export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$ROOT/.venv/torch_extensions}"

# Makes or updates .venv, or takes the caller's own environment.
ensure_environment() {
  bash scripts/setup.sh
  if [ -n "${LLAVA_PYTHON:-}" ]; then export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"; fi
}

# Replaces this process by a Python module, in an environment with EXTRAS. Its help takes the environment as it is.
run_module() { # module and its words
  if [[ " ${*:2} " == *" --help "* || " ${*:2} " == *" -h "* ]]; then
    [ -x "$PYTHON_BIN" ] || die "--help needs the environment; make it first: bash scripts/setup.sh"
  else
    export EXTRAS
    ensure_environment
  fi
  exec "$PYTHON_BIN" -m "$@"
}

# ---- training: a preset's values, then the flags of every run ----------------------------------------------------------

# The environment wins over the preset, the preset over the recipe, and the caller's flags win over all of them.
load_preset() { # the caller's flags
  : "${PRESET:=llama-3.2-3b}" "${NORM:=gwc_layernorm}"
  take_flags "$@"
  require_one_of PRESET "$(basename -s .sh "$ROOT"/scripts/presets/*.sh | xargs)"
  # shellcheck source=/dev/null
  source "$ROOT/scripts/presets/$PRESET.sh"
  # What both stages share (paper, section E).
  : "${VISION_TOWER:=google/siglip-so400m-patch14-384}" "${LABEL_MASKING:=upstream}"
  : "${EPOCHS:=1}" "${MAX_STEPS:=-1}" "${SEED:=42}"
  : "${ACTIVATION_CHECKPOINTING:=${GRADIENT_CHECKPOINTING:-auto}}" # the older name, of LLaVA's scripts, still counts
  : "${LIGER:=auto}"
}

# Takes over the flags that other defaults depend on: the arm names the folders, epochs replace the demo's steps.
take_flags() {
  local word variable=""
  [[ $# -eq 0 || $1 == -* ]] || die "$1 is not a flag of the trainer; variables stand before the command: NAME=value bash $0"
  for word in "$@"; do
    [ -z "$variable" ] || printf -v "$variable" %s "$word"
    variable=""
    case ${word//-/_} in
      __mm_projector_norm) variable=NORM ;;
      __num_train_epochs) variable=EPOCHS ;;
      __mm_projector_norm=*) NORM=${word#*=} ;;
      __num_train_epochs=*) EPOCHS=${word#*=} ;;
    esac
  done
}

# Hands the run over to llava/launch with the flags of both stages; it adds what depends on the devices, and leaves out a
# flag with an empty value.
launch() { # flags of this stage alone, and of the caller
  local python evaluates=${EVAL_DATA_PATH:-}
  python=$(plain_python) || exit
  : "${NUM_WORKERS:=4}" "${REPORT_TO:=auto}" "${SAVE_STRATEGY:=steps}" "${SAVE_STEPS:=1000}" "${SAVE_TOTAL_LIMIT:=1}"
  export STAGE PRESET GLOBAL_BATCH DATA_SOURCE INPUT_HINT CALLED_FROM PYTHON_BIN DRY_RUN RUN_NAME BF16 TF32 \
    NUM_GPUS CPU_RANKS NNODES HOSTFILE LAUNCHER MAX_RESTARTS NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ID
  exec "$python" -m llava.launch llava/train/train_mem.py \
    --plugin "${PLUGINS:-}" \
    --model_name_or_path "$MODEL_PATH" \
    --version "$PROMPT_VERSION" \
    --data_path "$DATA_PATH" \
    --image_folder "$IMAGE_FOLDER" \
    --image_aspect_ratio "${IMAGE_ASPECT_RATIO:-square}" \
    --image_grid_pinpoints "${IMAGE_GRID_PINPOINTS:-}" \
    --mm_patch_merge_type "${MM_PATCH_MERGE_TYPE:-}" \
    --vision_tower "$VISION_TOWER" \
    --mm_vision_select_layer -2 \
    --mm_vision_select_feature patch \
    --mm_projector_type "${PROJECTOR:-mlp2x_gelu}" \
    --mm_projector_norm "$NORM" \
    --mm_projector_norm_init "${NORM_INIT:-}" \
    --mm_projector_norm_learnable "${NORM_LEARNABLE:-}" \
    --label_masking "$LABEL_MASKING" \
    --model_max_length "$MODEL_MAX_LENGTH" \
    --deepspeed "$DEEPSPEED_CONFIG" \
    --activation_checkpointing "$ACTIVATION_CHECKPOINTING" \
    --per_device_train_batch_size "$PER_DEVICE_BATCH" \
    --max_tokens_per_micro_batch "${MAX_TOKENS_PER_MICRO_BATCH:-}" \
    --use_liger_kernel "$LIGER" \
    --optim "${OPTIM:-}" \
    --learning_rate "$LEARNING_RATE" \
    --lr_scheduler_type cosine \
    --warmup_ratio "${WARMUP_RATIO-0.03}" \
    --weight_decay 0.0 \
    --num_train_epochs "$EPOCHS" \
    --max_steps "$MAX_STEPS" \
    --max_grad_norm "${MAX_GRAD_NORM:-}" \
    --seed "$SEED" \
    --output_dir "$OUTPUT_DIR" \
    --attn_implementation "${ATTN_IMPLEMENTATION:-}" \
    --dataloader_num_workers "$NUM_WORKERS" \
    --logging_steps 1 \
    --report_to "$REPORT_TO" \
    --save_strategy "$SAVE_STRATEGY" \
    --save_steps "$SAVE_STEPS" \
    --save_total_limit "$SAVE_TOTAL_LIMIT" \
    --eval_data_path "${EVAL_DATA_PATH:-}" \
    --eval_image_folder "${EVAL_IMAGE_FOLDER:-}" \
    --eval_strategy "${evaluates:+steps}" \
    --eval_steps "${EVAL_STEPS:-${evaluates:+500}}" \
    --eval_on_start "${EVAL_ON_START:-}" \
    "$@"
}
