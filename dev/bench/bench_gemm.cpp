// Our matrix product against OpenBLAS's, in alternation: GFLOP/s (median of the samples) and their ratio.
// Absolute figures move with the clock and the neighbours; the ratio is what counts. One thread is timed by
// its CPU time, which other processes disturb little.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dev/bench/blas.h"
#include "dev/bench/timing.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"

namespace {

struct Shape {
    const char* name;
    Product product;
    size_t batch;
};

// The three products of a linear layer of N rows: y = x w^T, dx = dy w, dw = dy^T x.
void add_layer(std::vector<Shape>& shapes, const char* name, size_t N, size_t C, size_t OC) {
    shapes.push_back({name, {false, true, N, OC, C}, 1});
    shapes.push_back({"  dx", {false, false, N, C, OC}, 1});
    shapes.push_back({"  dw", {true, false, OC, C, N}, 1});
}

// The products of one Newton-Schulz step: X X^T, A A and B X.
void add_newton_schulz(std::vector<Shape>& shapes, const char* name, size_t rows, size_t columns,
                       size_t batch) {
    shapes.push_back({name, {false, true, rows, rows, columns}, batch});
    shapes.push_back({"  A A", {false, false, rows, rows, rows}, batch});
    shapes.push_back({"  B X", {false, false, rows, columns, rows}, batch});
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

void run(int threads, int samples) {
    Stream* stream = stream_create({.threads = threads});
    printf("%s; median of %d samples in alternation\n", device_name(stream).c_str(), samples);
    start_openblas(device_threads(stream));
    double (*const clock)() = device_threads(stream) == 1 ? cpu_seconds : now_seconds;
    printf("%-24s %6s %6s %6s %4s %10s %10s %7s\n", "product", "m", "n", "k", "T", "ours", "OpenBLAS",
           "ratio");

    double our_total = 0.0, blas_total = 0.0;
    for (const auto& [name, p, batch] : make_shapes()) {
        const size_t one[] = {p.m * p.k, p.k * p.n, p.m * p.n};
        float* buffers[3];
        for (int i = 0; i < 3; i++) {
            buffers[i] = static_cast<float*>(device_malloc(batch * one[i] * sizeof(float), stream));
            for (size_t j = 0; j < batch * one[i]; j++)
                buffers[i][j] = static_cast<float>(j * 2654435761u % 1000) * 1e-3f;
        }
        const auto ours = [&] {
            gemm_batched(buffers[2], buffers[0], buffers[1], static_cast<const float*>(nullptr),
                         p.transpose_a, p.transpose_b, p.m, p.n, p.k, 1.0f, 0.0f, batch, stream);
        };
        const auto blas = [&] {
            for (size_t l = 0; l < batch; l++)
                openblas_gemm(buffers[2] + l * one[2], buffers[0] + l * one[0], buffers[1] + l * one[1], p);
        };
        const double flops = static_cast<double>(batch) * p.flops();
        const size_t repeats = static_cast<size_t>(std::max(1.0, 1e9 / flops));
        std::vector<double> our_times, blas_times;
        ours();  // not timed: the first call takes its scratch
        for (int i = 0; i < samples; i++) {
            our_times.push_back(seconds_of(ours, repeats, clock));
            if (!have_openblas) continue;
            if (i == 0) blas();
            blas_times.push_back(seconds_of(blas, repeats, clock));
        }
        const double work = flops * static_cast<double>(repeats) * 1e-9;
        printf("%-24s %6zu %6zu %6zu %c%c %12.1f", name, p.m, p.n, p.k, p.transpose_a ? 'T' : '-',
               p.transpose_b ? 'T' : '-', work / median(our_times));
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
    choose_openblas_kernels(argv);
    try {
        run(argc > 1 ? atoi(argv[1]) : 0, argc > 2 ? std::max(1, atoi(argv[2])) : 7);
    } catch (const Error& error) {
        fprintf(stderr, "bench_gemm: %s\n", error.what());
        return 1;
    }
    return 0;
}
