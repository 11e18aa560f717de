# shellcheck shell=bash
# What the batch files share: names the rendezvous, prepares the environment once, starts one task per node. Sourced
# after STAGE is set, with the job submitted from the repository root.

# shellcheck source=scripts/lib.sh
source scripts/lib.sh
: "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 20000))}" # jobs that share a node get different ports
: "${NUM_GPUS:=$SLURM_GPUS_ON_NODE}"
export MASTER_ADDR MASTER_PORT NUM_GPUS NNODES="$SLURM_JOB_NUM_NODES" LAUNCHER=torchrun

if is_on "${DRY_RUN:-}"; then NODE_RANK=0 exec bash "scripts/$STAGE.sh" "$@"; fi
ensure_environment
# Each task takes its node's number from SLURM_NODEID as NODE_RANK. srun does not inherit --cpus-per-task from sbatch.
code=0
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
  bash "scripts/$STAGE.sh" "$@" || code=$?
# 85: SLURM's signal before the time limit ended the run after a save. The same job goes on when it is its turn again.
if [ "$code" -eq 85 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
