// Token and position embedding: two table look-ups added; the backward adds rows back into the tables.
//
// Memory-bound: 3 C values move for each token forward, 5 C backward. Several tokens may add to the same
// row of dwte, so the backward gives each thread its own channels, never its own tokens: no two threads
// touch one sum, and each sum runs over (b, t) in order.
#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

template <typename Storage>
void embedding_forward(Storage* out, const int* tokens, const Storage* wte, const Storage* wpe, size_t B,
                       size_t T, size_t C, Stream* stream) {
    check_sizes("embedding_forward", {B, T, C});
    for_rows(stream, B * T, C, [&](size_t row) {
        const Storage* token = wte + static_cast<size_t>(tokens[row]) * C;
        const Storage* position = wpe + row % T * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            out[row * C + c] = from_float<Storage>(to_float(token[c]) + to_float(position[c]));
        }
    });
}

template <typename Storage>
void embedding_backward(float* dwte, float* dwpe, const Storage* dout, const int* tokens, size_t B, size_t T,
                        size_t C, Stream* stream) {
    check_sizes("embedding_backward", {B, T, C});
    const auto add_channels = [&](size_t begin, size_t end) {
        for (size_t row = 0; row < B * T; row++) {
            const Storage* gradient = dout + row * C;
            float* token = dwte + static_cast<size_t>(tokens[row]) * C;
            float* position = dwpe + row % T * C;
#pragma omp simd
            for (size_t c = begin; c < end; c++) {
                token[c] += to_float(gradient[c]);
                position[c] += to_float(gradient[c]);
            }
        }
    };
    // One piece a thread, in whole cache lines of 16 floats; the cut changes no sum.
    const size_t pieces = B * T * C > parallel_grain ? static_cast<size_t>(stream->threads) : 1;
    for_chunks(stream, C, ceil_div(ceil_div(C, pieces), 16) * 16, add_channels);
}

#define INSTANTIATE(Storage)                                                                              \
    template void embedding_forward(Storage*, const int*, const Storage*, const Storage*, size_t, size_t, \
                                    size_t, Stream*);                                                     \
    template void embedding_backward(float*, float*, const Storage*, const int*, size_t, size_t, size_t,  \
                                     Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
