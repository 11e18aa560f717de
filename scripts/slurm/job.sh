# shellcheck shell=bash
# What the batch files share: it names the rendezvous, prepares the environment once, starts one task per node, and has
# the job requeued if a signal ended it. Sourced after STAGE is set, in the repository root.

# shellcheck source=scripts/lib.sh
source scripts/lib.sh
: "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 20000))}" # jobs that share a node get different ports
: "${NUM_GPUS:=${SLURM_GPUS_ON_NODE:-}}"
[ -n "$NUM_GPUS" ] || die "SLURM_GPUS_ON_NODE is not set: ask for GPUs (sbatch --gpus-per-node=8), or set NUM_GPUS"
export MASTER_ADDR MASTER_PORT NUM_GPUS NNODES="$SLURM_JOB_NUM_NODES" LAUNCHER=torchrun

if is_on "${DRY_RUN:-}"; then NODE_RANK=0 exec bash "scripts/$STAGE.sh" "$@"; fi
ensure_environment

# A task whose run was ended by a signal exits with 0 and leaves a file here, since srun would take 85 for a failure and
# kill the other nodes. `saved`: all ranks agreed to stop, and saved. `unsaved`: nothing was trained yet. Only this job
# uses the folder.
export LLAVA_REQUEUE_DIR="$PWD/.slurm-$SLURM_JOB_ID"
mkdir -p "$LLAVA_REQUEUE_DIR"
rm -f "$LLAVA_REQUEUE_DIR/saved" "$LLAVA_REQUEUE_DIR/unsaved"
unsaved_starts=$(cat "$LLAVA_REQUEUE_DIR/unsaved_starts" 2>/dev/null || echo 0)

# Each task takes its node's number from SLURM_NODEID as NODE_RANK. srun inherits neither --cpus-per-task nor, after
# `sbatch --export=...`, the variables. A node that does not notice that the others ended is ended two minutes after them.
code=0
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL --kill-on-bad-exit=1 --wait=120 \
  bash "scripts/$STAGE.sh" "$@" || code=$?

requeue() {
  scontrol requeue "$SLURM_JOB_ID" || echo "error: SLURM did not requeue the job; submit the same command again" >&2
  exit 85
}
if [ -e "$LLAVA_REQUEUE_DIR/saved" ]; then
  rm -rf "$LLAVA_REQUEUE_DIR"
  requeue
fi
# After a failure srun sends SIGTERM to the other nodes, which leave `unsaved` too: it counts only if no node failed.
if [ "$code" -eq 0 ] && [ -e "$LLAVA_REQUEUE_DIR/unsaved" ]; then
  if [ "$unsaved_starts" -lt 3 ]; then
    echo $((unsaved_starts + 1)) >"$LLAVA_REQUEUE_DIR/unsaved_starts"
    requeue
  fi
  rm -rf "$LLAVA_REQUEUE_DIR"
  die "the signal came before the first step in 4 starts in a row: give more time (sbatch --time=...)"
fi
rm -rf "$LLAVA_REQUEUE_DIR"
exit "$code"
