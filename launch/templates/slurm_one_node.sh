#!/bin/bash
# Slurm, one node: lowshard run starts and watches the ranks.
#
#   sbatch slurm_one_node.sh
#SBATCH --job-name=lowshard
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
# SIGTERM 60 s before the time is up, to this script: the exec below hands it on, and the ranks are ended in order.
#SBATCH --signal=B:TERM@60
set -euo pipefail

# The environment with lowshard in it, at a path that the node can read.
source "$HOME/venv/bin/activate"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# Without GPUs: leave --gpus-per-node away, nothing else changes.
exec lowshard run -n "$SLURM_NTASKS" "${PROGRAM:-train.py}" "$@"
