// The global gradient norm and clipping by it; see grad_clip.h.
#include "optim/grad_clip.h"

#include <cmath>
#include <vector>

#include "kernels/kernels.h"

size_t table_blocks(const ParameterTable& table) {
    size_t blocks = 0;
    for (const Parameter& parameter : table) blocks += parameter.blocks.size();
    return blocks;
}

double global_grad_norm(const float* grads, const ParameterTable& table, double* device_sums,
                        Stream* stream) {
    size_t index = 0;
    for (const Parameter& parameter : table) {
        for (const Block& block : parameter.blocks) {
            const float* first = grads + parameter.offset + block.first_row * parameter.cols;
            sum_of_squares(device_sums + index++, first, block.rows, parameter.cols, stream);
        }
    }
    std::vector<double> sums(index);
    copy_to_host(sums.data(), device_sums, index * sizeof(double), stream);
    double total = 0.0;
    for (double sum : sums) total += sum;
    return std::sqrt(total);
}

float clip_factor(double norm, double max_norm) {
    if (max_norm == 0.0) return 1.0f;
    const double factor = max_norm / (norm + 1e-6);
    return factor > 1.0 ? 1.0f : static_cast<float>(factor);  // keeps a NaN, which std::min would hide
}
