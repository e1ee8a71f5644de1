// OpenBLAS as a yardstick: its OpenMP build, with the kernels that fit this processor. A release that does
// not know the processor falls back to kernels of 2004 (Prescott) at a tenth of the speed, so it is told.
#pragma once

#include <cstddef>

#ifdef HAVE_OPENBLAS
#include <cblas.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

// d = op(a) op(b) + beta d, where op(a) (m,k) and op(b) (k,n) are transposed as stored if it says so.
struct Product {
    bool transpose_a, transpose_b;
    size_t m, n, k;

    double flops() const { return 2.0 * static_cast<double>(m * n) * static_cast<double>(k); }
};

#ifdef HAVE_OPENBLAS
constexpr bool have_openblas = true;

inline void openblas_gemm(float* d, const float* a, const float* b, const Product& p, float beta = 0.0f) {
    cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
                p.transpose_b ? CblasTrans : CblasNoTrans, static_cast<blasint>(p.m),
                static_cast<blasint>(p.n), static_cast<blasint>(p.k), 1.0f, a,
                static_cast<blasint>(p.transpose_a ? p.m : p.k), b,
                static_cast<blasint>(p.transpose_b ? p.k : p.n), beta, d, static_cast<blasint>(p.n));
}

// OpenBLAS chooses its kernels before main: where it fell back, the program starts again with the choice made
// for it. OPENBLAS_CORETYPE is OpenBLAS's own way to choose, and is left alone where it is set.
inline void choose_openblas_kernels(char** argv) {
    if (getenv("OPENBLAS_CORETYPE") != nullptr || strcmp(openblas_get_corename(), "Prescott") != 0) return;
#ifdef __x86_64__
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (!avx512 && !__builtin_cpu_supports("avx2")) return;
    setenv("OPENBLAS_CORETYPE", avx512 ? "SkylakeX" : "Haswell", 1);
    execv("/proc/self/exe", argv);
#endif
}

inline void start_openblas(int threads) {
    openblas_set_num_threads(threads);
    printf("OpenBLAS's kernels: %s\n", openblas_get_corename());
    if (openblas_get_parallel() != 2)
        printf("warning: this OpenBLAS does not use OpenMP; its own threads and ours disturb each other\n");
}
#else
constexpr bool have_openblas = false;
inline void openblas_gemm(float*, const float*, const float*, const Product&, float = 0.0f) {}
inline void choose_openblas_kernels(char**) {}
inline void start_openblas(int) {
    printf("built without OpenBLAS: no ratio (package libopenblas-openmp-dev)\n");
}
#endif
