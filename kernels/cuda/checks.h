// What the entry of every op checks, and what fits a launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>

#include "kernels/error.h"

// Every op refuses sizes of zero, by its name.
inline void check_sizes(const char* op, std::initializer_list<size_t> sizes) {
    for (size_t size : sizes) {
        if (size == 0) fail("%s: a size is zero", op);
    }
}

// A grid's first dimension, which is 31 bits wide.
inline unsigned grid_size(size_t blocks) {
    if (blocks > 0x7fffffff) fail("a tensor too large: %zu blocks, a GPU takes 2147483647", blocks);
    return static_cast<unsigned>(blocks);
}

// Threads of a block that shares `items` among them: whole warps, at most `most`.
inline unsigned block_size(size_t items, size_t most) {
    return static_cast<unsigned>(std::min((items + 31) / 32 * 32, most));
}
