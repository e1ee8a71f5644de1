// Sums of a whole tensor in fp64. Each is one pass over memory; the additions have a fixed shape.
#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

namespace {

// Adds neighbours level by level, in place: (0+1), (2+3), ...; an odd one out moves up as it is.
double tree_sum(double* x, size_t n) {
    for (; n > 1; n = ceil_div(n, 2)) {
        for (size_t i = 0; i < n / 2; i++) x[i] = x[2 * i] + x[2 * i + 1];
        if (n % 2 == 1) x[n / 2] = x[n - 1];
    }
    return x[0];
}

}  // namespace

// Chunks of a power of two are whole subtrees of the tree over all n, so threads may take one each.
void sum(double* out, const float* x, size_t n, Stream* stream) {
    check_sizes("sum", {n});
    constexpr size_t chunk = 4096;
    double* partial = static_cast<double*>(shared_scratch(stream, ceil_div(n, chunk) * sizeof(double)));
    for_chunks(stream, n, chunk, [&](size_t begin, size_t end) {
        double leaves[chunk];
        std::copy(x + begin, x + end, leaves);
        partial[begin / chunk] = tree_sum(leaves, end - begin);
    });
    *out = tree_sum(partial, ceil_div(n, chunk));
}

// The square of an fp32 is exact in fp64 and lies between 1e-90 and 1e77: nothing can over- or underflow.
void sum_of_squares(double* out, const float* x, size_t rows, size_t cols, Stream* stream) {
    check_sizes("sum_of_squares", {rows, cols});
    double* row_sums = static_cast<double*>(shared_scratch(stream, rows * sizeof(double)));
    for_rows(stream, rows, cols, [&](size_t row) {
        row_sums[row] = lane_sum<double>(cols, [&](size_t i) {
            const double value = x[row * cols + i];
            return value * value;
        });
    });
    *out = 0.0;
    for (size_t row = 0; row < rows; row++) *out += row_sums[row];
}
