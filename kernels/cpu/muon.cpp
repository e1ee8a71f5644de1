// Muon's elementwise parts (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, the
// normalisation before Newton-Schulz, and the weight update after it. All of them are memory-bound.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/rounding.h"
#include "kernels/kernels.h"

// Both averages are written as one step towards g or back from it: see adamw.cpp. Nothing chooses between g
// and its last use, for a compiler that made a branch of it would form other FMAs there than in vector code.
template <typename State>
void muon_momentum(float* direction, State* momentum, const float* grad, size_t n, float mu, bool nesterov,
                   float grad_scale, const StateRounding& rounding, Stream* stream) {
    check_sizes("muon_momentum", {n});
    const float pull = 1.0f - mu;
    const float look_ahead = nesterov ? pull : 0.0f;
    const auto average = [=](size_t begin, size_t end, const auto& word) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) {
            const float g = grad[i] * grad_scale;
            const float old_m = to_float(momentum[i]);
            const float new_m = old_m + pull * (g - old_m);
            direction[i] = new_m + look_ahead * (g - new_m);
            momentum[i] = from_float_stochastic<State>(new_m, word(i) & 0xffffu);
        }
    };
    for_chunks(stream, n, parallel_grain,
               [=](size_t begin, size_t end) { for_rounding_runs<State>(rounding, begin, end, average); });
}

template void muon_momentum(float*, float*, const float*, size_t, float, bool, float, const StateRounding&,
                            Stream*);
template void muon_momentum(float*, bf16_t*, const float*, size_t, float, bool, float, const StateRounding&,
                            Stream*);

// A matrix is summed in chunks of parallel_grain entries, counted from its own start, so that its bits do
// not depend on the batch it is in and large matrices use every thread. Squares of fp32 cannot leave the
// range of fp64, and the scale is applied in fp64 because it may itself leave fp32's range.
template <typename Storage>
void muon_normalize(Storage* x, int* degenerate, const float* direction, size_t batch, size_t n, float safety,
                    Stream* stream) {
    check_sizes("muon_normalize", {batch, n});
    const size_t chunks = ceil_div(n, parallel_grain);  // of each matrix
    double* scale = static_cast<double*>(shared_scratch(stream, batch * (1 + chunks) * sizeof(double)));
    double* partial = scale + batch;

    // Calls body(matrix, first, count, chunk's index) for every chunk of every matrix.
    const auto for_matrix_chunks = [&](const auto& body) {
        for_rows(stream, batch * chunks, std::min(n, parallel_grain), [&](size_t item) {
            const size_t matrix = item / chunks;
            const size_t begin = item % chunks * parallel_grain;
            body(matrix, matrix * n + begin, std::min(n - begin, parallel_grain), item);
        });
    };
    for_matrix_chunks([&](size_t, size_t first, size_t count, size_t item) {
        partial[item] = lane_sum<double>(count, [&](size_t i) {
            const double value = direction[first + i];
            return value * value;
        });
    });
    for (size_t matrix = 0; matrix < batch; matrix++) {
        double squares = 0.0;
        for (size_t c = 0; c < chunks; c++) squares += partial[matrix * chunks + c];
        degenerate[matrix] = squares == 0.0 || !std::isfinite(squares);
        scale[matrix] = 1.0 / (static_cast<double>(safety) * std::sqrt(squares));
    }
    for_matrix_chunks([&](size_t matrix, size_t first, size_t count, size_t) {
        if (degenerate[matrix]) {
            std::fill_n(x + first, count, from_float<Storage>(0.0f));
            return;
        }
        const double matrix_scale = scale[matrix];
#pragma omp simd
        for (size_t i = first; i < first + count; i++) {
            x[i] = from_float<Storage>(static_cast<float>(direction[i] * matrix_scale));
        }
    });
}

template <typename Storage, typename Update>
void muon_update(Storage* param, float* master, const Update* update, size_t n, float lr, float scale,
                 float weight_decay, Stream* stream) {
    check_sizes("muon_update", {n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("muon_update: 16-bit parameters need a master");
    const float decay = static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay);
    const float step_size = lr * scale;
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) {
            const float change = step_size * to_float(update[i]);
            const float p = (master != nullptr ? master[i] : to_float(param[i])) * decay - change;
            if (master != nullptr) master[i] = p;
            param[i] = from_float<Storage>(p);
        }
    });
}

#define INSTANTIATE(Storage)                                                                         \
    template void muon_normalize(Storage*, int*, const float*, size_t, size_t, float, Stream*);      \
    template void muon_update(Storage*, float*, const float*, size_t, float, float, float, Stream*); \
    template void muon_update(Storage*, float*, const fp16_t*, size_t, float, float, float, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
