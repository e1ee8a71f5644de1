// Muon's elementwise parts (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum and the
// normalisation before Newton-Schulz, and the weight update after it. All of them are memory-bound.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/rounding.h"
#include "kernels/kernels.h"

namespace {

// A block is taken in chunks of parallel_grain entries, counted from its own start, so that its bits do not
// depend on the batch it is in and large blocks use every thread. Calls body(block, begin, end, number) for
// each: entries begin..end of the block, and the chunk's number in the batch.
template <typename Body>
void for_block_chunks(const Stream* stream, size_t batch, size_t n, const Body& body) {
    const size_t chunks = ceil_div(n, parallel_grain);
    for_rows(stream, batch * chunks, std::min(n, parallel_grain), [&](size_t number) {
        const size_t begin = number % chunks * parallel_grain;
        body(number / chunks, begin, std::min(n, begin + parallel_grain), number);
    });
}

// Both averages are written as one step towards g or back from it: see adamw.cpp. Nothing chooses between g
// and its last use, for a compiler that made a branch of it would form other FMAs there than in vector code.
template <typename State>
void average(float* direction, State* momentum, const float* grad, size_t begin, size_t end,
             const MuonStep& step, bool nesterov, const StateRounding& rounding) {
    const float grad_scale = step.grad_scale, pull = 1.0f - step.mu, look_ahead = nesterov ? pull : 0.0f;
    for_rounding_runs<State>(rounding, begin, end, [=](size_t first, size_t last, const auto& word) {
#pragma omp simd
        for (size_t i = first; i < last; i++) {
            const float g = grad[i] * grad_scale;
            const float old_m = to_float(momentum[i]);
            const float new_m = old_m + pull * (g - old_m);
            direction[i] = new_m + look_ahead * (g - new_m);
            momentum[i] = from_float_stochastic<State>(new_m, word(i) & 0xffffu);
        }
    });
}

}  // namespace

// Squares of fp32 cannot leave the range of fp64, and the scale is applied in fp64 because it may itself
// leave fp32's range.
template <typename State, typename Storage>
void muon_prologue(Storage* x, int* degenerate, float* direction, const float* grads, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, bool nesterov, float safety, uint64_t seed,
                   Stream* stream) {
    check_sizes("muon_prologue", {batch, n});
    if (step->skip != 0) {
        std::fill_n(x, batch * n, from_float<Storage>(0.0f));
        std::fill_n(degenerate, batch, 0);
        return;
    }
    const size_t chunks = ceil_div(n, parallel_grain);  // of each block
    double* scale = static_cast<double*>(shared_scratch(stream, batch * (1 + chunks) * sizeof(double)));
    double* partial = scale + batch;
    for_block_chunks(stream, batch, n, [&](size_t b, size_t begin, size_t end, size_t number) {
        const MuonBlock& block = blocks[b];
        float* const mine = direction + b * n;
        average(mine, static_cast<State*>(block.momentum), grads + block.offset, begin, end, *step, nesterov,
                {seed, step->rounding_step, block.offset});
        partial[number] = lane_sum<double>(end - begin, [&](size_t i) {
            const double value = mine[begin + i];
            return value * value;
        });
    });
    for (size_t b = 0; b < batch; b++) {
        double squares = 0.0;
        for (size_t c = 0; c < chunks; c++) squares += partial[b * chunks + c];
        degenerate[b] = squares == 0.0 || !std::isfinite(squares);
        scale[b] = 1.0 / (static_cast<double>(safety) * std::sqrt(squares));
    }
    for_block_chunks(stream, batch, n, [&](size_t b, size_t begin, size_t end, size_t) {
        if (degenerate[b]) {
            std::fill(x + b * n + begin, x + b * n + end, from_float<Storage>(0.0f));
            return;
        }
        const double block_scale = scale[b];
#pragma omp simd
        for (size_t i = b * n + begin; i < b * n + end; i++) {
            x[i] = from_float<Storage>(static_cast<float>(direction[i] * block_scale));
        }
    });
}

template <typename Storage, typename Update>
void muon_epilogue(Storage* params, float* master, const Update* updates, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, float scale, Stream* stream) {
    check_sizes("muon_epilogue", {batch, n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("muon_epilogue: 16-bit parameters need a master");
    if (step->skip != 0) return;
    const bool cautious = step->cautious != 0;
    for_block_chunks(stream, batch, n, [&](size_t b, size_t begin, size_t end, size_t) {
        const float step_size = blocks[b].lr * scale, decay = blocks[b].decay;
        Storage* const param = params + blocks[b].offset;
        float* const own_master = master == nullptr ? nullptr : master + blocks[b].master_offset;
        const Update* const update = updates + b * n;
#pragma omp simd
        for (size_t i = begin; i < end; i++) {
            const float u = to_float(update[i]);
            const float old_p = own_master != nullptr ? own_master[i] : to_float(param[i]);
            const float kept = cautious && u * old_p < 0.0f ? 1.0f : decay;
            // Of two products the compiler would fuse either one, in vector code and in tails differently.
            const float p = std::fma(old_p, kept, -(step_size * u));
            if (own_master != nullptr) own_master[i] = p;
            param[i] = from_float<Storage>(p);
        }
    });
}

// Neurons are columns of a wide matrix: a chunk of them at a time, row by row, so that memory is read as it
// lies. The factors are found by one thread, in the neurons' order.
template <typename Update>
void muon_normalize_neurons(Update* o, float* v, const MuonStep* step, size_t rows, size_t cols, float beta2,
                            Stream* stream) {
    check_sizes("muon_normalize_neurons", {rows, cols});
    if (step->skip != 0) return;
    const bool tall = rows >= cols;
    const size_t neurons = std::max(rows, cols), entries = std::min(rows, cols);
    double* squares = static_cast<double*>(shared_scratch(stream, 2 * neurons * sizeof(double)));
    double* factors = squares + neurons;
    if (tall) {
        for_rows(stream, rows, cols, [&](size_t i) {
            squares[i] = lane_sum<double>(cols, [&](size_t j) {
                const double x = to_float(o[i * cols + j]);
                return x * x;
            });
        });
    } else {
        for_chunks(stream, cols, 256, [&](size_t begin, size_t end) {
            std::fill(squares + begin, squares + end, 0.0);
            for (size_t i = 0; i < rows; i++) {
                for (size_t j = begin; j < end; j++) {
                    const double x = to_float(o[i * cols + j]);
                    squares[j] += x * x;
                }
            }
        });
    }
    double before = 0.0, after = 0.0;
    for (size_t j = 0; j < neurons; j++) {
        const double mean = squares[j] / static_cast<double>(entries);
        v[j] = static_cast<float>(v[j] + (1.0 - static_cast<double>(beta2)) * (mean - v[j]));
        factors[j] = 1.0 / std::sqrt(std::max(static_cast<double>(v[j]), 1e-10));
        before += squares[j];
        after += squares[j] * factors[j] * factors[j];
    }
    const double rescale = after > 0.0 ? std::sqrt(before / after) : 0.0;
    for_rows(stream, rows, cols, [&](size_t i) {
        for (size_t j = 0; j < cols; j++) {
            Update& x = o[i * cols + j];
            x = from_float<Update>(static_cast<float>(to_float(x) * factors[tall ? i : j] * rescale));
        }
    });
}

#define INSTANTIATE_PROLOGUE(State, Storage)                                                   \
    template void muon_prologue<State>(Storage*, int*, float*, const float*, const MuonBlock*, \
                                       const MuonStep*, size_t, size_t, bool, float, uint64_t, Stream*);
#define INSTANTIATE(Storage)                                                                                \
    INSTANTIATE_PROLOGUE(float, Storage)                                                                    \
    INSTANTIATE_PROLOGUE(bf16_t, Storage)                                                                   \
    template void muon_epilogue(Storage*, float*, const float*, const MuonBlock*, const MuonStep*, size_t,  \
                                size_t, float, Stream*);                                                    \
    template void muon_epilogue(Storage*, float*, const fp16_t*, const MuonBlock*, const MuonStep*, size_t, \
                                size_t, float, Stream*);                                                    \
    template void muon_epilogue(Storage*, float*, const bf16_t*, const MuonBlock*, const MuonStep*, size_t, \
                                size_t, float, Stream*);                                                    \
    template void muon_normalize_neurons(Storage*, float*, const MuonStep*, size_t, size_t, float, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
