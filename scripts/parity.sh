#!/usr/bin/env bash
# Whether something costs loss: the same small model trained with it and without it, over three seeds, at the
# default learning rate. Prints the final validation losses, the mean of the differences from each block's first
# row, paired by seed, and the median time of the optimizer. Goes on where it was interrupted.
#
#   scripts/parity.sh precision|muon [--out DIR] [--steps N]
#
#   precision   storage in fp32, bf16 and fp16, and optimizer state in bf16, with both optimizers; 128 steps
#   muon        the variants of Newton-Schulz against its dense products in fp32; 256 steps
#
# A step has 4,096 tokens. JOBS runs take place at the same time, on a thread each (default: all cores).
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-} steps=
case $what in
    precision) steps=128 ;;
    muon) steps=256 ;;
    *) echo "parity.sh: '$what': must be precision or muon" >&2; exit 1 ;;
esac
shift
out=runs/parity
while [ $# -gt 0 ]; do
    case $1 in
        --out | --steps) [ $# -ge 2 ] || { echo "parity.sh: $1: a value is missing" >&2; exit 1; } ;;&
        --out) out=$2; shift 2 ;;
        --steps) steps=$2; shift 2 ;;
        *) echo "parity.sh: $1: not an option; see the head of this script" >&2; exit 1 ;;
    esac
done
seeds="1 2 3"
mkdir -p "$out"
[ -e "$out/novels_tokenizer.json" ] ||
    ./train_gpt tokenize --input data/text/sherlock_holmes.txt data/text/tom_sawyer.txt --out "$out/novels"

# The rows of a block: a name, and what is given beside the common options. The first is what the others are
# compared with.
blocks() {
    local optimizer
    if [ "$what" = precision ]; then
        for optimizer in muon adamw; do
            echo "$optimizer fp32|--optimizer $optimizer"
            echo "$optimizer bf16|--optimizer $optimizer --dtype bf16"
            echo "$optimizer fp16|--optimizer $optimizer --dtype fp16"
            echo "$optimizer fp32, bf16 state|--optimizer $optimizer --state-dtype bf16"
            [ $optimizer = adamw ] ||
                echo "$optimizer fp32, bf16 momentum|--optimizer $optimizer --muon-state-dtype bf16"
            echo
        done
        return
    fi
    local fp32="--optimizer muon --muon-ns-dtype fp32" fp16="--optimizer muon --muon-ns-dtype fp16"
    echo "dense, fp32|$fp32 --muon-ns-variant dense"
    echo "symmetric, fp32|$fp32 --muon-ns-variant symmetric"
    echo "gram, fp32|$fp32 --muon-ns-variant gram"
    echo "gram, fp16|$fp16 --muon-ns-variant gram"
    echo "cubic5, fp32|$fp32 --muon-ns cubic5"
    echo "gram cubic5, fp32|$fp32 --muon-ns cubic5 --muon-ns-variant gram"
    echo "gram cubic5, fp16|$fp16 --muon-ns cubic5 --muon-ns-variant gram"
    echo "keller, fp32|$fp32 --muon-ns keller"
    echo "you, fp32|$fp32 --muon-ns you"
    echo
}

folder_of() { echo "$out/$(tr -c 'a-z0-9\n' '_' <<<"$1")_$2_$steps"; } # name, seed

# Trains unless it has been done.
train() { # name, options, seed
    local run
    run=$(folder_of "$1" "$3")
    if grep -qs '"type":"done"' "$run/log.jsonl"; then return; fi
    rm -rf "$run"
    # shellcheck disable=SC2086 # options are words
    ./train_gpt --train-data "$out/novels_train_*.bin" --val-data "$out/novels_val_*.bin" --out "$run" \
        --layers 4 --heads 4 --channels 128 --seq-len 128 --batch-size 32 --tokens-per-step 4096 \
        --steps "$steps" --val-every 0 --val-tokens 110000 --sample-tokens 0 --keep 1 --seed "$3" --threads 1 \
        $2 >"$run.txt"
}

running=0
while IFS='|' read -r name options; do
    [ -n "$name" ] || continue
    for seed in $seeds; do
        if [ $running -ge "${JOBS:-$(nproc)}" ]; then wait -n; running=$((running - 1)); fi
        train "$name" "$options" "$seed" &
        running=$((running + 1))
    done
done < <(blocks)
while [ $running -gt 0 ]; do wait -n; running=$((running - 1)); done

# Of a run: its last validation loss; the median of its optimizer's times.
loss() { sed -n 's/.*"type":"val".*"val_loss":\([^,}]*\).*/\1/p' "$1/log.jsonl" | tail -n 1; }
optimizer_ms() {
    sed -n 's/.*"type":"train".*"optimizer_ms":\([^,}]*\).*/\1/p' "$1/log.jsonl" | sort -g |
        awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'
}

printf '%-27s %9s %9s %9s %10s %13s\n' "validation loss, nats" "seed 1" "seed 2" "seed 3" difference "optimizer ms"
reference=()
while IFS='|' read -r name options; do
    if [ -z "$name" ]; then reference=(); continue; fi
    losses=()
    for seed in $seeds; do losses+=("$(loss "$(folder_of "$name" "$seed")")"); done
    [ ${#reference[@]} -gt 0 ] || reference=("${losses[@]}")
    awk -v name="$name" -v reference="${reference[*]}" -v losses="${losses[*]}" \
        -v ms="$(optimizer_ms "$(folder_of "$name" 1)")" 'BEGIN {
        n = split(reference, a, " "); split(losses, b, " ")
        for (i = 1; i <= n; i++) { sum += (b[i] - a[i]) / a[i]; text = text sprintf(" %9.5f", b[i]) }
        printf "%-27s%s %+9.4f%% %13.1f\n", name, text, 100 * sum / n, ms }'
done < <(blocks)
