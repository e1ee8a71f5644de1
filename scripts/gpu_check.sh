#!/usr/bin/env bash
# Everything worth knowing about muGPT on a machine with an NVIDIA GPU, in under ten minutes.
#
#   scripts/gpu_check.sh [--out DIR] [--prebuilt DIR] [--size gpt2|tiny]
#
# Builds the CUDA programs (or takes those of --prebuilt DIR, made elsewhere by
#     make BACKEND=cuda STATIC=1 ARCHS=all MARCH=x86-64-v3 tests reproduce build/cuda/bench_ops
# so that this machine needs the driver and CUDA's libraries only), tests the instructions, the ops and the model
# on the device, measures every op, trains GPT-2 124M for a few steps in BF16 with each optimizer, and checks the
# project's claims by scripts/reproduce_98.sh, whose page is DIR/reproduce_98/report.html.
# Writes DIR/report.txt, DIR/report.json and the output of each step; the default DIR is runs/gpu_check.
# Ends with status 1 if a step failed; a step that cannot be done here is "skipped", never passed.
# --size tiny shrinks the measurements, so that the script itself can be tested on the simulator.
set -uo pipefail
cd "$(dirname "$0")/.."

out=runs/gpu_check prebuilt="" size=gpt2
while [ $# -gt 0 ]; do
    case $1 in
        --out | --prebuilt | --size)
            [ $# -ge 2 ] || { echo "gpu_check.sh: $1: a value is missing" >&2; exit 1; } ;;&
        --out) out=$2; shift 2 ;;
        --prebuilt) prebuilt=$2; shift 2 ;;
        --size) size=$2; shift 2 ;;
        *) echo "gpu_check.sh: $1: not an option; see the head of this script" >&2; exit 1 ;;
    esac
done
[ "$size" = gpt2 ] || [ "$size" = tiny ] || { echo "gpu_check.sh: --size $size: gpt2 or tiny" >&2; exit 1; }
mkdir -p "$out" || exit 1
programs=${prebuilt:-build/cuda}
cuda_tests="test_instructions test_cuda test_fused_linear"

# One step: its name, then a command. Its output goes to a file; what it came to, to the report.
report="" steps_json="" failed=0
finish_step() {
    local name=$1 result=$2 seconds=$3
    printf '%-22s %-8s %4d s\n' "$name" "$result" "$seconds"
    report+=$(printf '%-22s %-8s %4d s' "$name" "$result" "$seconds")$'\n'
    steps_json+="${steps_json:+,}{\"step\":\"$name\",\"result\":\"$result\",\"seconds\":$seconds}"
    [ "$result" != failed ] || failed=1
}
step() {
    local name=$1; shift
    local start=$SECONDS result=ok
    timeout "${step_limit:-300}" "$@" >"$out/$name.txt" 2>&1 || result=failed
    finish_step "$name" "$result" $((SECONDS - start))
    [ "$result" = ok ] || tail -n 5 "$out/$name.txt" | sed 's/^/    /'
    [ "$result" = ok ]
}
skip() {
    echo "$2" >"$out/$1.txt"
    finish_step "$1" skipped 0
}

finish() {
    local device=""
    [ ! -s "$out/ops.json" ] || device=$(sed -n 's/^ "device": "\(.*\)",$/\1/p' "$out/ops.json" | head -n 1)
    {
        echo "muGPT on ${device:-an unknown device}, $(git describe --always --dirty 2>/dev/null || echo unknown commit)"
        echo "$report"
        cat "$out"/train_*.summary "$out/ops.txt" 2>/dev/null
    } >"$out/report.txt"
    {
        printf '{"device":"%s","commit":"%s","size":"%s","failed":%d,\n"steps":[%s],\n"training":[' "$device" \
            "$(git describe --always --dirty 2>/dev/null)" "$size" "$failed" "$steps_json"
        local separator="" file
        for file in "$out"/train_*.json; do
            [ -s "$file" ] || continue
            printf '%s' "$separator"
            cat "$file"
            separator=,
        done
        printf ']'
        for file in ops ops_fused; do
            printf ',\n"%s":' "$file"
            if [ -s "$out/$file.json" ]; then cat "$out/$file.json"; else printf 'null'; fi
        done
        printf '}\n'
    } >"$out/report.json"
    echo "report: $out/report.txt, $out/report.json"
    exit "$failed"
}

if [ -z "$prebuilt" ]; then
    step_limit=600 step build make -j"$(nproc)" BACKEND=cuda program tests reproduce build/cuda/bench_ops || finish
else
    for program in train_gpt $cuda_tests test_kernels test_gpt bench_ops bench_throughput bench_plan; do
        [ -x "$programs/$program" ] || { echo "gpu_check.sh: --prebuilt $prebuilt: has no $program" >&2; exit 1; }
    done
fi
if command -v nvidia-smi >/dev/null; then step machine nvidia-smi; else skip machine "no nvidia-smi"; fi

# First the instructions of ptx.cuh, against the tables of the PTX ISA.
for program in $cuda_tests; do step "$program" "$programs/$program" --gtest_brief=1; done
few=${GPU_CHECK_FILTER:-*}  # the simulator, at thousandths of a GPU's speed, runs a few tests only
step op_suite "$programs/test_kernels" --gtest_brief=1 --gtest_filter="$few"
step model "$programs/test_gpt" --gtest_brief=1 --gtest_filter="${GPU_CHECK_MODEL_FILTER:-*Golden*}"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        step_limit=120 step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$programs/test_kernels" \
            --gtest_brief=1 --gtest_filter='*LayerNorm*:*CrossEntropy*'
    done
else
    skip memcheck "no compute-sanitizer on this machine"
fi

samples=(--samples 7)
[ "$size" = gpt2 ] || samples=(--samples 1 --sample-ms 0 --dtype bf16)
step ops "$programs/bench_ops" --size "$size" "${samples[@]}" --json "$out/ops.json"
step ops_fused "$programs/bench_ops" --size "$size" "${samples[@]}" --fused-epilogues --json "$out/ops_fused.json"

# The quickstart's text as bytes stands in for GPT-2's tokens: speed and memory do not depend on the ids.
model=(--model d12 --vocab-size 50257 --seq-len 1024 --batch-size 16 --tokens-per-step 131072 --steps 30)
[ "$size" = gpt2 ] ||
    model=(--layers 1 --heads 1 --channels 64 --seq-len 16 --batch-size 1 --tokens-per-step 32 --steps 3)
step tokenize "$programs/train_gpt" tokenize --input data/text/sherlock_holmes.txt data/text/tom_sawyer.txt \
    --out "$out/novels"

# The median of a key over the second half of a run's steps.
median() {
    sed -n "/\"type\":\"train\"/s/.*\"$2\":\([^,}]*\).*/\1/p" "$1" | awk '{ all[NR] = $1 } END {
        for (i = int(NR / 2) + 1; i <= NR; i++) print all[i] }' | sort -g | awk '{ all[NR] = $1 } END {
        print NR ? all[int((NR + 1) / 2)] : "null" }'
}
for optimizer in adamw muon; do
    run="$out/train_$optimizer"
    rm -rf "$run"
    step "train_$optimizer" "$programs/train_gpt" --train-data "$out/novels_train_*.bin" --out "$run" \
        --optimizer "$optimizer" --dtype bf16 "${model[@]}" --sample-tokens 0 || continue
    log="$run/log.jsonl"
    printf '{"optimizer":"%s","dtype":"bf16","tokens_per_second":%s,"mfu":%s,"ms":%s,"optimizer_ms":%s,"peak_bytes":%s}' \
        "$optimizer" "$(median "$log" tokens_per_second)" "$(median "$log" mfu)" "$(median "$log" ms)" \
        "$(median "$log" optimizer_ms)" "$(median "$log" peak_bytes)" >"$run.json"
    tr ',{}' '\n  ' <"$run.json" | sed 's/"//g' | grep -v '^ *$' | paste -sd' ' >"$run.summary"
    rm -rf "$run"/step_*
done

# The claims that need this GPU: throughput at 40,600 and 0.5M tokens a step, and memory. The same script without
# --only goes on with the rest, in the same folder, and takes minutes more.
if command -v python3 >/dev/null; then
    claims=gpu
    [ "$size" = gpt2 ] || claims=tiny
    step_limit=240 step reproduce_98 scripts/reproduce_98.sh --size "$claims" --only throughput,memory \
        --programs "$programs" --out "$out/reproduce_98"
    # Verdicts, whatever they are, are results, not failures of the check.
    grep -E '^(confirmed|refuted|not measurable here) ' "$out/reproduce_98.txt" >"$out/train_claims.summary" || true
else
    skip reproduce_98 "no python3 on this machine"
fi
finish
