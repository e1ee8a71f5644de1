#!/usr/bin/env bash
# Trains GPT-2 124M (d12) under Open MPI's mpirun, one rank a GPU:
#   TRAIN='/data/fineweb_train_*.bin' VAL='/data/fineweb_val_*.bin' RANKS=16 scripts/multi_node/run_mpi.sh \
#       --hostfile hosts
# Arguments go to mpirun. It only starts the ranks and says to each which it is: the program does not use MPI.
# On several nodes outside Slurm, MASTER_ADDR names the first machine of the hostfile, where rank 0 is.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${TRAIN:?the training shards, a pattern in quotes}" "${VAL:?the validation shards, a pattern in quotes}"
exec mpirun -np "${RANKS:-8}" --bind-to none ${MASTER_ADDR:+-x MASTER_ADDR} ${MASTER_PORT:+-x MASTER_PORT} "$@" \
    ./train_gpt --model d12 --train-data "$TRAIN" --val-data "$VAL" --out "${OUT:-runs/d12_mpi}" --resume \
    --optimizer "${OPTIMIZER:-muon}" --dtype "${DTYPE:-bf16}" --reduce-dtype "${REDUCE_DTYPE:-bf16}" --timeout 120 \
    ${VIRTUAL_RANKS:+--virtual-ranks "$VIRTUAL_RANKS"}
