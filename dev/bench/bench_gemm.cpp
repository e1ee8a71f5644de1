// Our matrix product against OpenBLAS's, in alternation: GFLOP/s (median of the samples) and their ratio.
// Absolute figures move with the clock and the neighbours; the ratio is what counts.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"
#ifdef HAVE_OPENBLAS
#include <cblas.h>
#endif

namespace {

struct Shape {
    const char* name;
    bool transpose_a, transpose_b;
    size_t m, n, k, batch;
};

// The three products of a linear layer of N rows: y = x w^T, dx = dy w, dw = dy^T x.
void add_layer(std::vector<Shape>& shapes, const char* name, size_t N, size_t C, size_t OC) {
    shapes.push_back({name, false, true, N, OC, C, 1});
    shapes.push_back({"  dx", false, false, N, C, OC, 1});
    shapes.push_back({"  dw", true, false, OC, C, N, 1});
}

// The products of one Newton-Schulz step: X X^T, A A and B X.
void add_newton_schulz(std::vector<Shape>& shapes, const char* name, size_t rows, size_t columns,
                       size_t batch) {
    shapes.push_back({name, false, true, rows, rows, columns, batch});
    shapes.push_back({"  A A", false, false, rows, rows, rows, batch});
    shapes.push_back({"  B X", false, false, rows, columns, rows, batch});
}

std::vector<Shape> make_shapes() {
    std::vector<Shape> shapes;
    add_layer(shapes, "GPT-2 qkv 1024 rows", 1024, 768, 2304);
    add_layer(shapes, "GPT-2 attention proj", 1024, 768, 768);
    add_layer(shapes, "GPT-2 fc", 1024, 768, 3072);
    add_layer(shapes, "GPT-2 fc proj", 1024, 3072, 768);
    add_layer(shapes, "GPT-2 fc 256 rows", 256, 768, 3072);
    add_layer(shapes, "GPT-2 head 256 rows", 256, 768, 50304);
    for (size_t N : {1024, 4096}) {
        add_layer(shapes, N == 1024 ? "C=128 qkv 1024 rows" : "C=128 qkv 4096 rows", N, 128, 384);
        add_layer(shapes, "C=128 attention proj", N, 128, 128);
        add_layer(shapes, "C=128 fc", N, 128, 512);
        add_layer(shapes, "C=128 fc proj", N, 512, 128);
    }
    add_newton_schulz(shapes, "NS 768x768", 768, 768, 1);
    add_newton_schulz(shapes, "NS 768x3072", 768, 3072, 1);
    add_newton_schulz(shapes, "NS 128x128, 12 of them", 128, 128, 12);
    add_newton_schulz(shapes, "NS 128x512, 4 of them", 128, 512, 4);
    return shapes;
}

template <typename Work>
double seconds_of(const Work& work, size_t repeats) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < repeats; i++) work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

#ifdef HAVE_OPENBLAS
void openblas_gemm(float* d, const float* a, const float* b, const Shape& s) {
    for (size_t l = 0; l < s.batch; l++) {
        cblas_sgemm(CblasRowMajor, s.transpose_a ? CblasTrans : CblasNoTrans,
                    s.transpose_b ? CblasTrans : CblasNoTrans, static_cast<blasint>(s.m),
                    static_cast<blasint>(s.n), static_cast<blasint>(s.k), 1.0f, a + l * s.m * s.k,
                    static_cast<blasint>(s.transpose_a ? s.m : s.k), b + l * s.k * s.n,
                    static_cast<blasint>(s.transpose_b ? s.k : s.n), 0.0f, d + l * s.m * s.n,
                    static_cast<blasint>(s.n));
    }
}
#endif

void run(int threads, int samples) {
    Stream* stream = stream_create({.threads = threads});
    printf("%s; median of %d samples in alternation\n", device_name(stream).c_str(), samples);
#ifdef HAVE_OPENBLAS
    openblas_set_num_threads(device_threads(stream));
    printf("OpenBLAS's kernels: %s\n", openblas_get_corename());
    if (openblas_get_parallel() != 2)
        printf("warning: this OpenBLAS does not use OpenMP; its own threads and ours disturb each other\n");
#else
    printf("built without OpenBLAS: no ratio (package libopenblas-openmp-dev)\n");
#endif
    printf("%-24s %6s %6s %6s %4s %10s %10s %7s\n", "product", "m", "n", "k", "T", "ours", "OpenBLAS",
           "ratio");

    double our_total = 0.0, blas_total = 0.0;
    for (const Shape& s : make_shapes()) {
        const size_t sizes[] = {s.batch * s.m * s.k, s.batch * s.k * s.n, s.batch * s.m * s.n};
        float* buffers[3];
        for (int i = 0; i < 3; i++) {
            buffers[i] = static_cast<float*>(device_malloc(sizes[i] * sizeof(float), stream));
            for (size_t j = 0; j < sizes[i]; j++)
                buffers[i][j] = static_cast<float>(j * 2654435761u % 1000) * 1e-3f;
        }
        const auto ours = [&] {
            gemm_batched(buffers[2], buffers[0], buffers[1], static_cast<const float*>(nullptr),
                         s.transpose_a, s.transpose_b, s.m, s.n, s.k, 1.0f, 0.0f, s.batch, stream);
        };
        const double flops = 2.0 * static_cast<double>(s.batch * s.m * s.n) * static_cast<double>(s.k);
        const size_t repeats = static_cast<size_t>(std::max(1.0, 1e9 / flops));
        std::vector<double> our_times, blas_times;
        ours();  // not timed: the first call takes its scratch
        for (int i = 0; i < samples; i++) {
            our_times.push_back(seconds_of(ours, repeats));
#ifdef HAVE_OPENBLAS
            const auto blas = [&] { openblas_gemm(buffers[2], buffers[0], buffers[1], s); };
            if (i == 0) blas();
            blas_times.push_back(seconds_of(blas, repeats));
#endif
        }
        const double work = flops * static_cast<double>(repeats) * 1e-9;
        printf("%-24s %6zu %6zu %6zu %c%c %12.1f", s.name, s.m, s.n, s.k, s.transpose_a ? 'T' : '-',
               s.transpose_b ? 'T' : '-', work / median(our_times));
        if (!blas_times.empty()) {
            printf(" %10.1f %7.2f", work / median(blas_times), median(blas_times) / median(our_times));
            our_total += median(our_times) / static_cast<double>(repeats);
            blas_total += median(blas_times) / static_cast<double>(repeats);
        }
        printf("\n");
        fflush(stdout);
        for (float* buffer : buffers) device_free(buffer, stream);
    }
    if (our_total > 0.0)
        printf("all of them, once: OpenBLAS's time is %.2f of ours\n", blas_total / our_total);
    stream_destroy(stream);
}

}  // namespace

// bench_gemm [threads [samples]]
int main(int argc, char** argv) {
    try {
        run(argc > 1 ? atoi(argv[1]) : 0, argc > 2 ? std::max(1, atoi(argv[2])) : 7);
    } catch (const Error& error) {
        fprintf(stderr, "bench_gemm: %s\n", error.what());
        return 1;
    }
    return 0;
}
