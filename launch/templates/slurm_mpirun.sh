#!/bin/bash
# Slurm, many nodes, started by lowshard run: for an MPI that srun cannot start; failures are told as on one node.
#
#   sbatch slurm_mpirun.sh
#SBATCH --job-name=lowshard
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
# SIGTERM 60 s before the time is up, to this script: the exec below hands it on, and the ranks are ended in order.
#SBATCH --signal=B:TERM@60
set -euo pipefail

# The environment with lowshard in it, on a file system that all nodes share.
source "$HOME/venv/bin/activate"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# mpiexec takes the nodes from Slurm. Nodes must reach the first one over TCP (any port) for the watch over ranks.
exec lowshard run -n "$SLURM_NTASKS" "${PROGRAM:-train.py}" "$@"
