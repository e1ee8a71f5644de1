// The global gradient norm and clipping by it; see grad_clip.h.
#include "optim/grad_clip.h"

#include <cmath>
#include <vector>

#include "kernels/kernels.h"

void block_square(double* sum, const float* grads, const Parameter& parameter, const Block& block,
                  Stream* stream) {
    const float* first = grads + parameter.offset + block.first_row * parameter.cols;
    sum_of_squares(sum, first, block.rows, parameter.cols, stream);
}

std::vector<double> block_squares(const float* grads, const ParameterTable& table, const Ownership& ownership,
                                  double* device_sums, Stream* stream) {
    std::vector<double> sums(table_blocks(table));
    device_memset_zero(device_sums, sums.size() * sizeof(double), stream);
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        if (ownership.own(number)) block_square(device_sums + number, grads, parameter, block, stream);
    });
    copy_to_host(sums.data(), device_sums, sums.size() * sizeof(double), stream);
    return sums;
}

double global_grad_norm(const std::vector<double>& squares) {
    double total = 0.0;
    for (const double square : squares) total += square;
    return std::sqrt(total);
}

float clip_factor(double norm, double max_norm) {
    if (max_norm == 0.0) return 1.0f;
    const double factor = max_norm / (norm + 1e-6);
    return factor > 1.0 ? 1.0f : static_cast<float>(factor);  // keeps a NaN, which std::min would hide
}
