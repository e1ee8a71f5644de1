// Token and position embedding: two table look-ups added; the backward adds rows back into the tables.
//   forward:   out(b,t,:) = wte(token(b,t),:) + wpe(t,:)
//   backward:  dwte(token(b,t),:) += dout(b,t,:),   dwpe(t,:) += dout(b,t,:)
//
// Forward: 3 values of Storage move for each of N*C outputs, one addition: memory-bound. A warp takes a row,
// so that its token is read once and its channels are read in one go.
//
// Backward: many rows may add to one row of dwte, and every sum must run over (b,t) in order. So the tokens
// are sorted first, in pieces that fit shared memory; then one block takes each distinct token of a piece,
// adds its rows in order in registers, and no two blocks touch one sum. Bytes for each row and channel: dout
// twice (for dwte and for dwpe), and 8 for each distinct token; sorting moves 12 bytes a row, whatever C is.
#include <algorithm>
#include <climits>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned forward_threads = 256;

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(forward_threads)
    embedding_forward_kernel(Storage* __restrict__ out, const int* __restrict__ tokens,
                             const Storage* __restrict__ wte, const Storage* __restrict__ wpe, size_t N,
                             size_t T, size_t C) {
    constexpr unsigned size = pack_size<Storage>;
    const size_t row = size_t{blockIdx.x} * (forward_threads / warpSize) + threadIdx.x / warpSize;
    if (row >= N) return;
    const Storage* token = wte + static_cast<size_t>(tokens[row]) * C;
    const Storage* position = wpe + row % T * C;
    for (size_t c = threadIdx.x % warpSize * size; c < C; c += warpSize * size) {
        const Pack<float, size> a = load_pack<vectors, size>(token + c, C - c);
        const Pack<float, size> b = load_pack<vectors, size>(position + c, C - c);
        Pack<float, size> sum;
        for (unsigned i = 0; i < size; i++) sum.element[i] = a.element[i] + b.element[i];
        store_pack<vectors>(out + row * C + c, sum, C - c);
    }
}

// ---------------------------------------------------------------------------------------------------
// Backward

constexpr unsigned piece_rows = 4096;  // sorted together: 32 KiB of keys
constexpr unsigned sort_threads = 1024;
constexpr unsigned add_threads = 256;  // at most

// A stretch of equal tokens in a sorted piece, kept in its first place. Elsewhere `length` is 0.
struct Place {
    int row;     // of the sorted order: the row of dout that stands here
    int length;  // places from here on with this token
};

// Bitonic sort (Batcher 1968) of `size` keys in shared memory, a power of two, by the whole block. The pairs
// that one step compares and swaps are disjoint; a barrier parts the steps.
__device__ void sort_keys(unsigned long long* keys, unsigned size) {
    for (unsigned sorted = 2; sorted <= size; sorted *= 2) {
        for (unsigned stride = sorted / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (unsigned pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                const unsigned low = 2 * pair - (pair & (stride - 1)), high = low + stride;
                const bool ascending = (low & sorted) == 0;
                const unsigned long long a = keys[low], b = keys[high];
                if ((a > b) == ascending) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    }
    __syncthreads();
}

// Each block sorts the rows of one piece by token, and equal tokens by row: both are in the key.
__global__ void __launch_bounds__(sort_threads)
    sort_tokens_kernel(Place* __restrict__ places, const int* __restrict__ tokens, size_t N,
                       unsigned keys_a_piece) {
    unsigned long long* keys = shared<unsigned long long>(keys_a_piece);
    const size_t first = size_t{blockIdx.x} * piece_rows;
    const unsigned rows = static_cast<unsigned>(min(size_t{piece_rows}, N - first));
    for (unsigned i = threadIdx.x; i < keys_a_piece; i += blockDim.x) {
        const unsigned long long absent = ~0ull;
        keys[i] = i < rows ? static_cast<unsigned long long>(tokens[first + i]) << 32 | i : absent;
    }
    sort_keys(keys, keys_a_piece);
    const auto token = [&](unsigned place) { return keys[place] >> 32; };
    for (unsigned i = threadIdx.x; i < rows; i += blockDim.x) {
        int length = 0;
        if (i == 0 || token(i - 1) != token(i)) {
            do length++;
            while (i + length < rows && token(i + length) == token(i));
        }
        places[first + i] = {static_cast<int>(first + static_cast<unsigned>(keys[i])), length};
    }
}

// Block i takes the token that starts at place i of a piece, if one does.
template <typename Storage, bool vectors>
__global__ void __launch_bounds__(add_threads)
    add_token_rows_kernel(float* __restrict__ dwte, const Storage* __restrict__ dout,
                          const int* __restrict__ tokens, const Place* __restrict__ places, size_t C) {
    constexpr unsigned size = 4;
    const Place* place = places + blockIdx.x;
    const int length = place->length;
    if (length == 0) return;
    float* sum = dwte + static_cast<size_t>(tokens[place->row]) * C;
    for (size_t c = threadIdx.x * size; c < C; c += blockDim.x * size) {
        Pack<float, size> total = load_pack<vectors, size>(sum + c, C - c);
#pragma unroll 4
        for (int k = 0; k < length; k++) {  // loads of several rows are on their way at once
            const Storage* gradient = dout + static_cast<size_t>(place[k].row) * C;
            const Pack<float, size> g = load_pack<vectors, size>(gradient + c, C - c);
            for (unsigned i = 0; i < size; i++) total.element[i] += g.element[i];
        }
        store_pack<vectors>(sum + c, total, C - c);
    }
}

// Block t adds the gradients of position t, in the order of b.
template <typename Storage, bool vectors>
__global__ void __launch_bounds__(add_threads)
    add_position_rows_kernel(float* __restrict__ dwpe, const Storage* __restrict__ dout, size_t B, size_t T,
                             size_t C) {
    constexpr unsigned size = 4;
    const size_t t = blockIdx.x;
    float* sum = dwpe + t * C;
    for (size_t c = threadIdx.x * size; c < C; c += blockDim.x * size) {
        Pack<float, size> total = load_pack<vectors, size>(sum + c, C - c);
#pragma unroll 4
        for (size_t b = 0; b < B; b++) {
            const Pack<float, size> g = load_pack<vectors, size>(dout + (b * T + t) * C + c, C - c);
            for (unsigned i = 0; i < size; i++) total.element[i] += g.element[i];
        }
        store_pack<vectors>(sum + c, total, C - c);
    }
}

}  // namespace

template <typename Storage>
void embedding_forward(Storage* out, const int* tokens, const Storage* wte, const Storage* wpe, size_t B,
                       size_t T, size_t C, Stream* stream) {
    check_sizes("embedding_forward", {B, T, C});
    const bool vectors = C % pack_size<Storage> == 0 && aligned_to_16(out, wte, wpe);
    const size_t N = B * T;
    launch(vectors ? embedding_forward_kernel<Storage, true> : embedding_forward_kernel<Storage, false>,
           grid_size(ceil_div(N, forward_threads / 32)), forward_threads, 0, stream, out, tokens, wte, wpe, N,
           T, C);
}

template <typename Storage>
void embedding_backward(float* dwte, float* dwpe, const Storage* dout, const int* tokens, size_t B, size_t T,
                        size_t C, Stream* stream) {
    check_sizes("embedding_backward", {B, T, C});
    const size_t N = B * T;
    if (N > INT_MAX) fail("embedding_backward: B*T = %zu is above %d", N, INT_MAX);
    const bool vectors = C % 4 == 0 && aligned_to_16(dwte, dwpe, dout);
    const unsigned threads = block_size(ceil_div(C, 4), add_threads);

    launch(vectors ? add_position_rows_kernel<Storage, true> : add_position_rows_kernel<Storage, false>,
           grid_size(T), threads, 0, stream, dwpe, dout, B, T, C);

    Place* places = static_cast<Place*>(device_scratch(stream, N * sizeof(Place)));
    unsigned keys = 2;
    while (keys < piece_rows && keys < N) keys *= 2;
    launch(sort_tokens_kernel, grid_size(ceil_div(N, piece_rows)), block_size(keys / 2, sort_threads),
           shared_bytes<unsigned long long>(keys), stream, places, tokens, N, keys);
    // One after the other, so that a token's sum goes through the pieces in order.
    for (size_t first = 0; first < N; first += piece_rows) {
        launch(vectors ? add_token_rows_kernel<Storage, true> : add_token_rows_kernel<Storage, false>,
               grid_size(std::min<size_t>(piece_rows, N - first)), threads, 0, stream, dwte, dout, tokens,
               places + first, C);
    }
}

#define INSTANTIATE(Storage)                                                                              \
    template void embedding_forward(Storage*, const int*, const Storage*, const Storage*, size_t, size_t, \
                                    size_t, Stream*);                                                     \
    template void embedding_backward(float*, float*, const Storage*, const int*, size_t, size_t, size_t,  \
                                     Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
