#!/usr/bin/env bash
# What 16-bit storage costs in loss: the same small model in fp32, bf16 and fp16, with both optimizers, over
# three seeds, at the default learning rate. Prints the final validation losses and the mean of the
# differences from fp32, paired by seed. Goes on where it was interrupted.
#
#   scripts/precision.sh [--out DIR] [--steps N]      default: runs/precision, 128 steps of 4,096 tokens
#
# STATE_DTYPES="fp32 bf16" also compares the types of optimizer state, in fp32 training.
set -euo pipefail
cd "$(dirname "$0")/.."

out=runs/precision steps=128
while [ $# -gt 0 ]; do
    case $1 in
        --out | --steps) [ $# -ge 2 ] || { echo "precision.sh: $1: a value is missing" >&2; exit 1; } ;;&
        --out) out=$2; shift 2 ;;
        --steps) steps=$2; shift 2 ;;
        *) echo "precision.sh: $1: not an option; see the head of this script" >&2; exit 1 ;;
    esac
done
seeds="1 2 3"
mkdir -p "$out"
[ -e "$out/novels_tokenizer.json" ] ||
    ./train_gpt tokenize --input data/text/sherlock_holmes.txt data/text/tom_sawyer.txt --out "$out/novels"

# Trains unless it has been done; prints the last validation loss.
loss() {
    local optimizer=$1 dtype=$2 state=$3 seed=$4
    local run="$out/${optimizer}_${dtype}_${state}_${seed}_${steps}"
    if ! grep -qs '"type":"done"' "$run/log.jsonl"; then
        rm -rf "$run"
        local state_option=()
        [ "$state" = fp32 ] || state_option=(--state-dtype "$state")
        ./train_gpt --train-data "$out/novels_train_*.bin" --val-data "$out/novels_val_*.bin" --out "$run" \
            --layers 4 --heads 4 --channels 128 --seq-len 128 --batch-size 32 --tokens-per-step 4096 \
            --steps "$steps" --val-every 0 --val-tokens 110000 --sample-tokens 0 --seed "$seed" \
            --optimizer "$optimizer" --dtype "$dtype" "${state_option[@]}" >"$run.txt"
    fi
    sed -n 's/.*"type":"val".*"val_loss":\([^,}]*\).*/\1/p' "$run/log.jsonl" | tail -n 1
}

row() {
    local optimizer=$1 dtype=$2 state=$3
    local reference=() losses=() seed
    for seed in $seeds; do
        reference+=("$(loss "$optimizer" fp32 fp32 "$seed")")
        losses+=("$(loss "$optimizer" "$dtype" "$state" "$seed")")
    done
    awk -v name="$optimizer $dtype, $state state" -v reference="${reference[*]}" -v losses="${losses[*]}" 'BEGIN {
        n = split(reference, a, " "); split(losses, b, " ")
        for (i = 1; i <= n; i++) { sum += (b[i] - a[i]) / a[i]; text = text sprintf(" %9.5f", b[i]) }
        printf "%-28s%s %+9.4f%%\n", name, text, 100 * sum / n }'
}

printf '%-28s %9s %9s %9s %10s\n' "final validation loss, nats" "seed 1" "seed 2" "seed 3" "to fp32"
for optimizer in muon adamw; do
    for dtype in fp32 bf16 fp16; do row "$optimizer" "$dtype" fp32; done
    for state in ${STATE_DTYPES:-}; do [ "$state" = fp32 ] || row "$optimizer" fp32 "$state"; done
done
