#!/usr/bin/env bash
# Whether something costs or saves loss: the same small model trained with it and without it, over three seeds, at
# the default learning rate. Prints the final validation losses, the mean of the differences from each block's
# first row, paired by seed, and the median time of the optimizer. Goes on where it was interrupted.
#
#   scripts/parity.sh precision|muon|dropin|shock [--out DIR] [--steps N] [--seeds "1 2 3"]
#
#   precision   storage in fp32, bf16 and fp16, and optimizer state in bf16, with both optimizers; 128 steps
#   muon        the variants of Newton-Schulz against its dense products in fp32; 256 steps
#   dropin      AdamW and Muon, which takes over AdamW's settings, at a quarter to four times the learning rate that
#               suits AdamW best; 128 steps
#   shock       --lr-adapt against the plain cosine, with both optimizers, each step cut into 4 virtual ranks:
#               undisturbed; the learning rate three times too high; the second half of the steps with half the
#               tokens; random tokens in the 20 steps after the middle; 128 steps
#
# A step has 4,096 tokens. JOBS runs take place at the same time, on a thread each (default: all cores).
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-} steps='' batch=32
case $what in
    precision) steps=128 ;;
    muon) steps=256 ;;
    dropin) steps=128 ;;
    shock) steps=128 batch=4 ;; # half a step is a micro-batch for each virtual rank
    *) echo "parity.sh: '$what': must be precision, muon, dropin or shock" >&2; exit 1 ;;
esac
shift
out=runs/parity seeds="1 2 3"
while [ $# -gt 0 ]; do
    case $1 in
        --out | --steps | --seeds) [ $# -ge 2 ] || { echo "parity.sh: $1: a value is missing" >&2; exit 1; } ;;&
        --out) out=$2; shift 2 ;;
        --steps) steps=$2; shift 2 ;;
        --seeds) seeds=$2; shift 2 ;;
        *) echo "parity.sh: $1: not an option; see the head of this script" >&2; exit 1 ;;
    esac
done
mkdir -p "$out"
[ -e "$out/novels_tokenizer.json" ] ||
    ./train_gpt tokenize --input data/text/sherlock_holmes.txt data/text/tom_sawyer.txt --out "$out/novels"
if [ "$what" = shock ] && [ ! -e "$out/noise_tokenizer.json" ]; then
    LC_ALL=C awk 'BEGIN { srand(1); for (i = 0; i < 100000; i++) printf "%c", 1 + int(255 * rand()) }' >"$out/noise"
    ./train_gpt tokenize --input "$out/noise" --out "$out/noise"
fi

# The rows of a block: a name, what is given beside the common options, and where the row goes on from the middle
# of another one, that row's name and what happens to it then. The first is what the others are compared with.
precision_blocks() {
    local optimizer
    for optimizer in muon adamw; do
        echo "$optimizer fp32|--optimizer $optimizer"
        echo "$optimizer bf16|--optimizer $optimizer --dtype bf16"
        echo "$optimizer fp16|--optimizer $optimizer --dtype fp16"
        echo "$optimizer fp32, bf16 state|--optimizer $optimizer --state-dtype bf16"
        [ $optimizer = adamw ] ||
            echo "$optimizer fp32, bf16 momentum|--optimizer $optimizer --muon-state-dtype bf16"
        echo
    done
}

muon_blocks() {
    local fp32="--optimizer muon --muon-ns-dtype fp32" fp16="--optimizer muon --muon-ns-dtype fp16"
    local dense="--muon-ns-variant dense" symmetric="--muon-ns-variant symmetric" gram="--muon-ns-variant gram"
    echo "dense, fp32|$fp32 --muon-ns polar-express $dense"
    echo "symmetric, fp32|$fp32 --muon-ns polar-express $symmetric"
    echo "gram, fp32|$fp32 --muon-ns polar-express $gram"
    echo "gram, fp16|$fp16 --muon-ns polar-express $gram"
    echo "cubic5, fp32|$fp32 --muon-ns cubic5 $symmetric"
    echo "gram cubic5, fp32|$fp32 --muon-ns cubic5 $gram"
    echo "gram cubic5, fp16|$fp16 --muon-ns cubic5 $gram"
    echo "keller, fp32|$fp32 --muon-ns keller $symmetric"
    echo "you, fp32|$fp32 --muon-ns you $symmetric"
    echo
}

lr=1.2e-3 # AdamW's best of 1.5e-4, 3e-4, 6e-4, 1.2e-3 and 2.4e-3
dropin_blocks() {
    local optimizer times
    for times in 1:$lr 1/4:3e-4 1/2:6e-4 2:2.4e-3 4:4.8e-3; do
        for optimizer in adamw muon; do
            echo "$optimizer, lr x ${times%:*}|--optimizer $optimizer --lr ${times#*:}"
        done
    done
    echo
}

shock_blocks() {
    local optimizer shock adapt
    for optimizer in muon adamw; do
        for shock in undisturbed "lr x 3" halved corrupt; do
            for adapt in "" " --lr-adapt"; do
                local name="$optimizer, $shock$adapt" plain="$optimizer, undisturbed$adapt"
                local options="--optimizer $optimizer --virtual-ranks 4$adapt"
                options+=" --checkpoint-every $((steps / 2))"
                case $shock in
                    undisturbed) echo "$name|$options --lr $lr" ;;
                    "lr x 3") echo "$name|$options --lr $(awk "BEGIN { print 3 * $lr }")" ;;
                    *) echo "$name||$plain|$shock" ;;
                esac
            done
            echo
        done
    done
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
        --layers 4 --heads 4 --channels 128 --seq-len 128 --batch-size $batch --tokens-per-step 4096 \
        --steps "$steps" --val-every 0 --val-tokens 110000 --sample-tokens 0 --seed "$3" --threads 1 \
        $2 >"$run.txt"
}

# Random tokens in place of text for 20 steps, at the learning rate that the cosine has in their middle; then the
# text from its beginning.
corrupt() { # run
    local until=$((steps / 2 + 20))
    local rate
    rate=$(awk "BEGIN { w = int($steps / 10); x = ($until - 10 - w) / ($steps - w)
        print $lr * (1 + cos(x * atan2(0, -1))) / 2 }")
    ./train_gpt --out "$1" --resume --new-data --train-data "$out/noise_train_*.bin" --steps $until \
        --schedule constant --lr "$rate"
    ./train_gpt --out "$1" --resume --new-data --train-data "$out/novels_train_*.bin" --steps "$steps" \
        --schedule cosine --lr "$lr"
}

# Goes on from the middle of another row's run, unless it has been done.
branch() { # name, the other's name, what happens, seed
    local run part
    run=$(folder_of "$1" "$4")
    part=$run.part
    if [ -d "$run" ]; then return; fi
    rm -rf "$part"
    cp -r "$(folder_of "$2" "$4")" "$part"
    rm -r "$part/step_$(printf %08d "$steps")"
    case $3 in
        halved) ./train_gpt --out "$part" --resume --tokens-per-step 2048 ;;
        corrupt) corrupt "$part" ;;
    esac >"$run.txt"
    mv "$part" "$run"
}

# The rows that go on from others come after them.
running=0
for pass in whole branch; do
    for seed in $seeds; do
        while IFS='|' read -r name options from event; do
            [ -n "$name" ] || continue
            if [ $pass = branch ] && [ -z "$from" ] || [ $pass = whole ] && [ -n "$from" ]; then continue; fi
            if [ $running -ge "${JOBS:-$(nproc)}" ]; then wait -n; running=$((running - 1)); fi
            if [ $pass = whole ]; then
                train "$name" "$options" "$seed" &
            else
                branch "$name" "$from" "$event" "$seed" &
            fi
            running=$((running + 1))
        done < <("${what}_blocks")
    done
    while [ $running -gt 0 ]; do wait -n; running=$((running - 1)); done
done

# Of a run: its last validation loss; the median of its optimizer's times.
loss() { sed -n 's/.*"type":"val".*"val_loss":\([^,}]*\).*/\1/p' "$1/log.jsonl" | tail -n 1; }
optimizer_ms() {
    sed -n 's/.*"type":"train".*"optimizer_ms":\([^,}]*\).*/\1/p' "$1/log.jsonl" | sort -g |
        awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'
}

printf '%-32s' "validation loss, nats"
for seed in $seeds; do printf ' %9s' "seed $seed"; done
printf ' %10s %13s\n' difference "optimizer ms"
reference=()
while IFS='|' read -r name _; do
    if [ -z "$name" ]; then reference=(); continue; fi
    losses=()
    for seed in $seeds; do losses+=("$(loss "$(folder_of "$name" "$seed")")"); done
    [ ${#reference[@]} -gt 0 ] || reference=("${losses[@]}")
    awk -v name="$name" -v reference="${reference[*]}" -v losses="${losses[*]}" \
        -v ms="$(optimizer_ms "$(folder_of "$name" "${seeds%% *}")")" 'BEGIN {
        n = split(reference, a, " "); split(losses, b, " ")
        for (i = 1; i <= n; i++) { sum += (b[i] - a[i]) / a[i]; text = text sprintf(" %9.5f", b[i]) }
        printf "%-32s%s %+9.4f%% %13.1f\n", name, text, 100 * sum / n, ms }'
done < <("${what}_blocks")
