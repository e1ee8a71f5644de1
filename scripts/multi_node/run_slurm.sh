#!/usr/bin/env bash
#SBATCH --job-name=mugpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@300
# Trains GPT-2 124M (d12) on the nodes of a Slurm job, one rank a GPU:
#   TRAIN='/data/fineweb_train_*.bin' VAL='/data/fineweb_val_*.bin' sbatch scripts/multi_node/run_slurm.sh
# srun says to each rank which it is; nothing else is needed. 300 seconds before the time limit every rank
# gets SIGTERM, finishes its step, saves and ends; the next job of the same OUT goes on from there.
set -euo pipefail

: "${TRAIN:?the training shards, a pattern in quotes}" "${VAL:?the validation shards, a pattern in quotes}"
# Slurm runs a copy of this script elsewhere, so start it from the repository's root.
cd "${SLURM_SUBMIT_DIR:-.}"

exec srun ./train_gpt --model d12 --train-data "$TRAIN" --val-data "$VAL" --out "${OUT:-runs/d12_slurm}" --resume \
    --optimizer "${OPTIMIZER:-muon}" --dtype "${DTYPE:-bf16}" --reduce-dtype "${REDUCE_DTYPE:-bf16}" --timeout 120 \
    ${VIRTUAL_RANKS:+--virtual-ranks "$VIRTUAL_RANKS"} "$@"
