#!/bin/bash
# Run train.py on every GPU of two nodes with `sbatch examples/slurm.sh`. The ranks rendezvous at the first node.
#SBATCH --job-name=ringattn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_PER_NODE" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    -m ringattn.examples.train --seqlen 1m --steps 1000 --checkpoint "runs/$SLURM_JOB_NAME" "$@"
