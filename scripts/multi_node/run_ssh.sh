#!/usr/bin/env bash
# Trains GPT-2 124M (d12) on machines that ssh reaches, without Slurm or MPI:
#   TRAIN='/data/fineweb_train_*.bin' VAL='/data/fineweb_val_*.bin' scripts/multi_node/run_ssh.sh node1 node2
# or on this machine alone, where no machine is named (`train_gpt --ranks 8` does the same by itself). Each
# machine has RANKS_PER_NODE ranks (8), and this folder and the data at the same paths. The variables are
# those that torchrun sets; `torchrun --no-python ./train_gpt ...` works as well.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${TRAIN:?the training shards, a pattern in quotes}" "${VAL:?the validation shards, a pattern in quotes}"
per_node=${RANKS_PER_NODE:-8}
nodes=("$@")
[ ${#nodes[@]} -gt 0 ] || nodes=(127.0.0.1)
ranks=$((${#nodes[@]} * per_node))
# Rank 0 listens here; a number in the range that Linux leaves alone, the same for all ranks.
port=${MASTER_PORT:-$((20000 + RANDOM % 10000))}

train=(./train_gpt --model d12 --train-data "$TRAIN" --val-data "$VAL" --out "${OUT:-runs/d12_ssh}" --resume
    --optimizer "${OPTIMIZER:-muon}" --dtype "${DTYPE:-bf16}" --reduce-dtype "${REDUCE_DTYPE:-bf16}" --timeout 120)
[ -z "${VIRTUAL_RANKS:-}" ] || train+=(--virtual-ranks "$VIRTUAL_RANKS")

# Starts a rank; its command is quoted once more for the shell at the other end of ssh. A terminal there (-tt)
# makes the rank get SIGHUP when ssh is ended here.
start() {
    local node=$1 rank=$2 command
    command="$(printf '%q ' cd "$PWD")&& exec $(printf '%q ' env RANK="$rank" WORLD_SIZE="$ranks" \
        LOCAL_RANK=$((rank % per_node)) LOCAL_WORLD_SIZE="$per_node" GROUP_RANK=$((rank / per_node)) \
        MASTER_ADDR="${nodes[0]}" MASTER_PORT="$port" "${train[@]}")"
    case $node in
        127.0.0.1) bash -c "$command" & ;;
        *) ssh -tt -o BatchMode=yes "$node" "$command" </dev/null & ;;
    esac
    pids+=($!)
}

# Process groups of their own keep Ctrl-C from reaching ranks twice: a second signal ends a rank at once.
set -m
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM
for ((rank = 0; rank < ranks; rank++)); do start "${nodes[rank / per_node]}" "$rank"; done

# A rank that fails ends all of them. A wait that the trap interrupts goes on.
status=0
for pid in "${pids[@]}"; do
    ended=0
    wait "$pid" || ended=$?
    while kill -0 "$pid" 2>/dev/null; do ended=0 && wait "$pid" || ended=$?; done
    [ $ended -eq 0 ] || status=1
done
exit $status
