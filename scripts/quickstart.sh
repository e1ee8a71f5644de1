#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a trained GPT: sets up, builds, tokenizes the two novels in
# data/text, trains a small model with Muon, then the same model with AdamW, and compares the two.
# Takes about 5 minutes on 2 cores after the build. Everything goes to runs/quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
echo "building ..."
make -j"$(nproc)" >/dev/null

out=runs/quickstart
rm -rf "$out"
mkdir -p "$out"
./train_gpt tokenize --input data/text/sherlock_holmes.txt data/text/tom_sawyer.txt --out "$out/novels"

# One model, one recipe; --optimizer is the only difference between the two runs.
train() {
    ./train_gpt --train-data "$out/novels_train_*.bin" --val-data "$out/novels_val_*.bin" --out "$out/$1" \
        --optimizer "$1" --layers 4 --heads 4 --channels 128 --seq-len 128 \
        --batch-size 32 --tokens-per-step 4096 --steps 700 --lr 6e-3 --warmup 50 --final-lr-frac 0.1 \
        --val-every 100 --val-tokens 110000 --checkpoint-every 350 --log-every 20 \
        --sample-every 350 --sample-tokens 200 --temperature 0.8
    # A run that Ctrl-C stopped has saved itself, but is no result.
    tail -n 1 "$out/$1/log.jsonl" | grep -q '"type":"done"' || { echo "quickstart.sh: stopped" >&2; exit 130; }
}
train muon
train adamw

# The last value of a key in a run's log, from the last line of a type.
value() { grep "\"type\":\"$2\"" "$out/$1/log.jsonl" | tail -n 1 | sed "s/.*\"$3\":\([^,}]*\).*/\1/"; }
# The median of a key over the training steps.
median() { grep '"type":"train"' "$out/$1/log.jsonl" | sed "s/.*\"$2\":\([^,}]*\).*/\1/" | sort -g | sed -n '350p'; }

printf '\n%-34s %12s %12s\n' "" muon adamw
row() { printf "%-34s %12$4 %12$4\n" "$1" "$2" "$3"; }
row "validation loss, nats per byte" "$(value muon val val_loss)" "$(value adamw val val_loss)" .4f
row "tokens per second, median" "$(median muon tokens_per_second)" "$(median adamw tokens_per_second)" .0f
row "optimizer ms a step, median" "$(median muon optimizer_ms)" "$(median adamw optimizer_ms)" .1f
row "optimizer state, bytes" "$(value muon config optimizer_state_bytes)" \
    "$(value adamw config optimizer_state_bytes)" .0f
echo
echo "the Muon model goes on from a prompt (./train_gpt generate):"
checkpoint=$(ls -d "$out"/muon/step_* | tail -n 1)
./train_gpt generate --model "$checkpoint" --prompt "Sherlock Holmes said" --tokens 200 --temperature 0.7
echo
