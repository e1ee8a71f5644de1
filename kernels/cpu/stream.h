// What a Stream is on the CPU; shared by the files of this backend only.
#pragma once

#include <atomic>
#include <cstddef>
#include <unordered_map>
#include <vector>

#include "kernels/device.h"

// A block of scratch that only grows, aligned to 64 bytes.
struct Scratch {
    void* memory = nullptr;
    size_t bytes = 0;
};

struct Stream {
    int threads;
    Scratch shared;                                 // for one op at a time: partial sums, packed matrices
    std::vector<Scratch> per_thread;                // one a thread
    std::unordered_map<void*, size_t> allocations;  // what device_malloc gave out
    std::atomic<size_t> allocated{0}, peak{0};  // bytes; threads grow their scratch inside parallel regions
};

// At least `bytes` of scratch, valid until the next call for the same block. Contents are unspecified.
void* shared_scratch(Stream* stream, size_t bytes);
void* thread_scratch(Stream* stream, int thread, size_t bytes);

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
