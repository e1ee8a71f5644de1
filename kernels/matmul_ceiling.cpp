// The machine's own ceiling of matrix products; see matmul_ceiling.h.
#include "kernels/matmul_ceiling.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels/dtype.h"
#include "kernels/kernels.h"

template <typename Storage>
double measure_matmul_ceiling(Stream* stream) {
    using clock = std::chrono::steady_clock;
    constexpr size_t largest = 8192;
    constexpr double long_enough = 4e-3;  // seconds
    for (size_t n = 256;; n *= 2) {
        Storage* memory = static_cast<Storage*>(device_malloc(3 * n * n * sizeof(Storage), stream));
        device_memset_zero(memory, 3 * n * n * sizeof(Storage), stream);
        double best = INFINITY;
        for (int i = 0; i < 4; i++) {  // the first also warms up
            const auto start = clock::now();
            gemm_batched<Storage>(memory, memory + n * n, memory + 2 * n * n, nullptr, false, true, n, n, n,
                                  1, 0, 1, stream);
            stream_synchronize(stream);
            best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
        }
        device_free(memory, stream);
        if (best >= long_enough || n == largest) return 2.0 * static_cast<double>(n * n * n) / best;
    }
}

template double measure_matmul_ceiling<float>(Stream*);
template double measure_matmul_ceiling<bf16_t>(Stream*);
template double measure_matmul_ceiling<fp16_t>(Stream*);
