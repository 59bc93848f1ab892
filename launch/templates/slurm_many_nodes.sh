#!/bin/bash
# Slurm, many nodes, started by srun through PMIx: for an MPI with PMIx inside (Open MPI 5, MPICH built with it).
#
#   sbatch slurm_many_nodes.sh        (srun --mpi=list says whether this Slurm has pmix)
#SBATCH --job-name=lowshard
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
# SIGTERM to every rank 60 s before the time is up.
#SBATCH --signal=TERM@60
set -euo pipefail

# The environment with lowshard in it, on a file system that all nodes share.
source "$HOME/venv/bin/activate"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# -m lowshard.launch.child makes an exception or a sys.exit(n) in one rank end all ranks, as lowshard run does.
# --kill-on-bad-exit does the same for a rank that dies. Each rank takes the GPU of its rank on the node.
exec srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python -m lowshard.launch.child "${PROGRAM:-train.py}" "$@"
