#!/usr/bin/env bash
# Can the op suite fail? Breaks a copy of a CUDA source in one place, a barrier, a wait, a bounds check, and
# demands that the suite in the simulator, or test_cuda, notices, for each place below. Needs build/sim's objects.
set -euo pipefail
cd "$(dirname "$0")/../.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/build"
cp -a Makefile kernels optim model data cli dist dev train_gpt.cu test_gpt.cu "$copy"
cp -a build/git_commit.h "$copy/build"
find build/sim -name '*.o' -print0 | xargs -0 cp -a --parents -t "$copy"
git init -q "$copy" # so that the Makefile's question for the commit ends there

failed=0
# A source (of kernels/cuda, or with its folder), a sed command that breaks it, the tests that must notice, and
# their program.
mutate() {
    local file=$1 command=$2 tests=$3 program=build/sim/${4:-test_kernels}
    case $1 in */*) ;; *) file=kernels/cuda/$1 ;; esac
    sed "$command" "$file" >"$copy/$file"
    if cmp -s "$file" "$copy/$file"; then
        echo "mutations: $1: nothing matches $command" >&2
        failed=1
    elif ! make -C "$copy" -s BACKEND=sim "$program" >"$copy/log" 2>&1; then
        grep -m 3 error "$copy/log" >&2
        echo "mutations: $1: $command: does not compile" >&2
        failed=1
    elif (ulimit -c 0; "$copy/$program" --gtest_filter="$tests") >"$copy/log" 2>&1; then
        echo "mutations: $1: $command: NOT noticed by $tests" >&2
        failed=1
    else
        echo "$1: $command: $(grep -m 1 -oE 'cudasim: .*|.*: Failure' "$copy/log" | cut -c -120)"
    fi
    cp "$file" "$copy/$file"
}

# The first barrier of each; the wait for a tile; what keeps a thread within its rows and columns.
mutate layernorm.cu '0,/__syncthreads();/s///' '*/0.LayerNormBackward'
mutate cross_entropy.cu '0,/__syncthreads();/s///' '*/0.CrossEntropy'
mutate reduce.cu '0,/__syncthreads();/s///' 'Reductions.*'
mutate linear.cu '0,/__syncthreads();/s///' '*/0.LinearBackward'
mutate embedding.cu '0,/__syncthreads();/s///' '*/0.Embedding'
mutate attention_general.cu '0,/__syncthreads();/s///' '*/0.AttentionIsCausal'
mutate attention_flash.cu '0,/__syncthreads();/s///' '*/1.AttentionIsCausal'
mutate attention_flash.cu '0,/cp_async_wait<0>();/s///' '*/1.AttentionIsCausal'
mutate attention_flash.cu 's/first + i + my_row < T/first + i + my_row <= T/' '*/1.AttentionIsCausal'
mutate gemm_symmetric.cu '0,/__syncthreads();/s///' '*/1.Symmetric*' test_cuda
mutate gemm_symmetric.cu 's/cp_async_wait<stages - 2>();//' '*/1.Symmetric*' test_cuda
mutate gemm_symmetric.cu 's/if (!diagonal) {/if (true) {/' '*/1.Symmetric*' test_cuda
mutate gemm_symmetric.cu 's/row < rows/row <= rows/' '*/1.Symmetric*' test_cuda
mutate muon.cu '0,/if (step->skip != 0) return;/s///' '*/0.MuonBlocks'
mutate device.cu 's/ || replay->scratch_moves != stream->scratch_moves//' 'Replay.*' test_cuda
mutate embedding.cu 's/if (row >= N) return;/if (row > N) return;/' '*/0.Embedding'
mutate linear.cu 's/if (column >= OC) return;//' '*/0.LinearForward'
# What one stream must wait for on another: gradients before they are sent, their sums before the update, the
# update before it is sent, weights before the next forward.
mutate dist/data_parallel.cpp '0,/stream_wait(dp.transfers, dp.ready);/s///' 'Ranks.*' test_simulated_ranks
mutate dist/data_parallel.cpp 's/stream_wait(dp.compute, dp.reduced);//' 'Ranks.*' test_simulated_ranks
mutate dist/data_parallel.cpp '/void gather_weights/,$s/stream_wait(dp.transfers, dp.ready);//' 'Ranks.*' test_simulated_ranks
mutate dist/data_parallel.cpp 's/stream_wait(dp.compute, dp.gathered\[stage\]);/(void)stage;/' 'Ranks.*' test_simulated_ranks
exit $failed
