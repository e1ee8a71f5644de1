#!/usr/bin/env bash
# Sets up, builds and runs every test. --fast leaves out the sanitizers, the simulator and nvcc.
# The last line is "N passed, N failed, N skipped"; the exit status is 0 where nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.."

fast=0
for argument in "$@"; do
    case $argument in
        --fast) fast=1 ;;
        *) echo "test.sh: $argument: the one option is --fast" >&2; exit 1 ;;
    esac
done

scripts/setup.sh || exit 1
jobs=$(nproc)
# Threads that wait do not spin: tests of many small ops on a machine that does other things as well.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
tests="test_plan test_math test_kernels test_optim test_data test_checkpoint test_cli test_data_parallel test_dist test_gpt test_program test_ranks"
passed=0 failed=0 skipped=0

# Adds up what a GoogleTest program said and shows it where a test failed or was skipped; one that ended without
# a summary has failed.
count() {
    local log=$1 status=$2
    local p f s
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    s=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    if [ -z "$p" ] || { [ $status -ne 0 ] && [ -z "$f" ]; }; then f=$((${f:-0} + 1)); fi
    if [ "${f:-0}" -ne 0 ] || [ "${s:-0}" -ne 0 ]; then cat "$log"; fi
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0})) skipped=$((skipped + ${s:-0}))
}

# Runs a GoogleTest program and adds up its results. With SEEDS="0 1", once under each seed of the simulator, at the
# same time and with one thread each; CUDASIM_LAUNCHES is then a folder that gets the list of each.
run_test() {
    local program=$1; shift
    local logs; logs=$(mktemp -d)
    local start=$SECONDS before="$passed $failed $skipped" seeds=${SEEDS:-0} seed
    echo "== $program${SEEDS:+, seeds $SEEDS}"
    for seed in $seeds; do
        (
            if [ -n "${SEEDS:-}" ]; then
                export CUDASIM_SEED=$seed OMP_NUM_THREADS=1
                [ -z "${CUDASIM_LAUNCHES:-}" ] || export CUDASIM_LAUNCHES=$CUDASIM_LAUNCHES/$seed
            fi
            "$program" --gtest_brief=1 "$@" >"$logs/$seed" 2>&1
            echo $? >"$logs/$seed.status"
        ) &
    done
    wait
    for seed in $seeds; do count "$logs/$seed" "$(cat "$logs/$seed.status")"; done
    rm -rf "$logs"
    # shellcheck disable=SC2086
    set -- $before
    echo "   $((passed - $1)) passed, $((failed - $2)) failed, $((skipped - $3)) skipped ($((SECONDS - start)) s)"
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

# A test that is a command: passed where it ends with status 0. Its output is shown where it fails.
run_command() {
    local name=$1; shift
    local log; log=$(mktemp)
    local start=$SECONDS
    echo "== $name"
    if "$@" >"$log" 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); cat "$log"; fi
    echo "   $((SECONDS - start)) s"
    rm -f "$log"
}

# Builds, or ends the run: nothing after it would mean much.
build() { make -j"$jobs" "$@" || { failed=$((failed + 1)); finish; }; }

build BACKEND=cpu tests reproduce build/cpu/bench_handicapped
for test in $tests; do run_test "build/cpu/$test"; done
run_command "test_reproduce.py: scripts/reproduce_98.sh" python3 dev/test/test_reproduce.py
[ $fast -eq 0 ] || finish

# The CPU's programs for any machine, under each instruction set that is here; and the op suite on lesser machines,
# one without AVX-512 and one without AVX2.
build BACKEND=cpu MARCH=any build/cpu-any/test_portable build/cpu-any/test_math build/cpu-any/test_kernels
run_test build/cpu-any/test_portable
run_test build/cpu-any/test_math
for lacks in AVX512F AVX2; do
    echo "without $lacks:"
    GLIBC_TUNABLES=glibc.cpu.hwcaps=-$lacks run_test build/cpu-any/test_kernels
done

# The same tests under AddressSanitizer and UBSan. Programs end by exit() on bad input, so leaks are not
# faults there. test_program starts the program of its own build many times and stays with the plain build.
export ASAN_OPTIONS=detect_leaks=0
build BACKEND=cpu SANITIZE=1 CXXFLAGS="-O1 -g1" tests
for test in test_math test_kernels test_optim test_data test_checkpoint test_cli test_data_parallel test_dist test_gpt; do
    run_test "build/cpu-sanitize/$test" --gtest_filter="-*Slow*"
done

# The CUDA sources in the simulator: the simulator's own tests, the instructions, every op under several
# orders of threads, the model against PyTorch's numbers, training against the CPU's, and gpu_check.sh.
build BACKEND=sim tests reproduce build/sim/bench_ops
for test in test_cudasim test_cublaslt test_nccl test_instructions test_cuda test_fused_linear; do
    run_test "build/sim/$test"
done
launches=$(mktemp -d)
SEEDS="0 1 2" CUDASIM_LAUNCHES=$launches run_test build/sim/test_kernels
run_command "every kernel was launched" dev/test/launches_check "$launches"/*
SEEDS="1 2" run_test build/sim/test_cuda
run_test build/sim/test_optim --gtest_filter=Muon.ReplayedStepsEqualDirectOnes
model="Golden.*:SixteenBit*.LogitsLossGradients"
run_test build/sim/test_gpt --gtest_filter="$model"
run_test build/sim/test_backends
CUDASIM_DEVICES=4 run_test build/sim/test_simulated_ranks
CUDASIM_DEVICES=4 run_command "mutations of the CUDA sources" dev/test/mutations.sh
out=$(mktemp -d)
GPU_CHECK_FILTER='*LayerNorm*' GPU_CHECK_MODEL_FILTER='Golden.LogitsLossGradients' \
    run_command "gpu_check.sh on the simulator" scripts/gpu_check.sh --prebuilt build/sim --size tiny --out "$out"
rm -rf "$out"

# What nvcc makes of them, and what the program says where there is no GPU.
no_gpu() {
    local out said status=0
    build/cuda/train_gpt --version | grep -E 'cuda backend with(out)? NCCL' || return 1
    out=$(mktemp -d)
    build/cuda/train_gpt tokenize --input data/text/tom_sawyer.txt --out "$out/text"
    said=$(build/cuda/train_gpt --train-data "$out/text_train_*.bin" --layers 1 --heads 1 --channels 64 --seq-len 16 \
        --tokens-per-step 64 --steps 1 2>&1 >/dev/null) || status=$?
    rm -rf "$out"
    echo "$said"
    [ "$status" -eq 1 ] && [ "$(wc -l <<<"$said")" -eq 1 ] && grep -q 'make cpu' <<<"$said"
}
if command -v nvcc >/dev/null; then
    build BACKEND=cuda build/cuda/train_gpt
    if ! nvidia-smi >/dev/null 2>&1; then run_command "the CUDA program without a GPU" no_gpu; fi
    echo "== ptxas_report"
    cat "$launches"/* >"$launches/all"
    if LAUNCHES=$launches/all ARCHS="80 90" dev/bench/ptxas_report; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
    run_command "contraction_check" dev/bench/contraction_check
    echo "== sass_check"
    if said=$(dev/bench/sass_check); then
        echo "$said"
        if grep -q 'sass_check: skipped' <<<"$said"; then skipped=$((skipped + 1)); else passed=$((passed + 1)); fi
    else
        echo "$said"
        failed=$((failed + 1))
    fi
else
    echo "== nvcc is not here: kernels/cuda is not compiled for a GPU"
    skipped=$((skipped + 1))
fi
rm -rf "$launches"
finish
