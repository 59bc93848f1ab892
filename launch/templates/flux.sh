#!/bin/bash
# Flux, one or many nodes, started by flux run.
#
#   flux batch flux.sh
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=60m
# flux: --signal=SIGTERM@60s
set -euo pipefail

# The environment with lowshard in it, on a file system that all nodes share.
source "$HOME/venv/bin/activate"

NODES=2 # as above
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
CORES_PER_RANK=${CORES_PER_RANK:-8}
export OMP_NUM_THREADS=$CORES_PER_RANK

# Open MPI wants -o pmi=pmix (the flux-pmix plugin); MPICH and its kin start with Flux's own PMI: leave it away.
# -m lowshard.launch.child makes an exception or a sys.exit(n) in one rank end all ranks, as lowshard run does.
exec flux run -N "$NODES" -n "$((NODES * RANKS_PER_NODE))" -c "$CORES_PER_RANK" ${GPUS_PER_RANK:+-g "$GPUS_PER_RANK"} \
    -o pmi=pmix -o exit-timeout=5s -o cpu-affinity=per-task \
    python -m lowshard.launch.child "${PROGRAM:-train.py}" "$@"
