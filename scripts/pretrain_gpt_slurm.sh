#!/usr/bin/env bash
#SBATCH --job-name=pretrain_gpt
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=runs/slurm-%j.log
# Pre-train on a Slurm cluster: one torchrun per node, one rank per GPU.
#
#   mkdir -p runs
#   sbatch --nodes=16 scripts/pretrain_gpt_slurm.sh --config configs/gpt_175b.yaml --data-path PREFIX \
#     --tokenizer-model FILE --save /shared/checkpoints --load /shared/checkpoints --save-interval 500 \
#     --exit-duration-in-mins 1400
#
# Submit from the repository root. Arguments go to pretrain_gpt.py. Let --exit-duration-in-mins end some minutes before
# the job's time limit: the run then saves and stops, and resumes when submitted again (torchrun gives its workers only
# 30 s between SIGTERM and SIGKILL, too short to save a large model). Where a rank dies, hangs or diverges,
# torchrun starts all ranks again from the newest checkpoint, up to MAX_RESTARTS times (docs/failures.md). A node that
# the log names twice: sbatch --exclude=NODE.
# Environment: PY (python of the environment, default .venv/bin/python), GPUS_PER_NODE (default 8), MASTER_PORT,
# MAX_RESTARTS (default 3; 0: none).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | sed -n 1p)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

exec srun --kill-on-bad-exit=1 "${PY:-.venv/bin/python}" -m torch.distributed.run \
  --nnodes="${SLURM_JOB_NUM_NODES}" \
  --nproc-per-node="${GPUS_PER_NODE:-8}" \
  --max-restarts="${MAX_RESTARTS:-3}" \
  --rdzv-backend=c10d \
  --rdzv-id="${SLURM_JOB_ID}" \
  --rdzv-endpoint="${MASTER_ADDR}:${MASTER_PORT}" \
  pretrain_gpt.py "$@"
