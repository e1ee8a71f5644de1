#!/usr/bin/env bash
# Sets up, builds and runs every test. --fast leaves out the sanitizer build.
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
tests="test_plan test_kernels test_optim test_data test_checkpoint test_cli test_gpt test_program"
passed=0 failed=0 skipped=0

# Runs a GoogleTest program and adds up its results; one that ends without a summary has failed.
run_test() {
    local program=$1; shift
    local log; log=$(mktemp)
    local start=$SECONDS
    echo "== $program"
    "$program" --gtest_brief=1 "$@" >"$log" 2>&1
    local status=$?
    local p f s
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    s=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$log" | head -n 1)
    if [ -z "$p" ] || { [ $status -ne 0 ] && [ -z "$f" ]; }; then f=$((${f:-0} + 1)); fi
    if [ "${f:-0}" -ne 0 ] || [ "${s:-0}" -ne 0 ]; then cat "$log"; fi
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0})) skipped=$((skipped + ${s:-0}))
    echo "   ${p:-0} passed, ${f:-0} failed, ${s:-0} skipped ($((SECONDS - start)) s)"
    rm -f "$log"
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

if ! make -j"$jobs" tests; then failed=1; finish; fi
for test in $tests; do run_test "build/cpu/$test"; done

if [ $fast -eq 0 ]; then
    # The same tests under AddressSanitizer and UBSan. Programs end by exit() on bad input, so leaks are not
    # faults there. test_program starts the program of its own build many times and stays with the plain build.
    export ASAN_OPTIONS=detect_leaks=0
    if ! make -j"$jobs" SANITIZE=1 CXXFLAGS="-O1 -g1" tests; then failed=$((failed + 1)); finish; fi
    for test in test_kernels test_optim test_data test_checkpoint test_cli test_gpt; do
        run_test "build/cpu-sanitize/$test" --gtest_filter="-*Slow*"
    done
fi
finish
