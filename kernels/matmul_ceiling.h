// The rate of a large matrix product on this machine: what MFU is measured against.
#pragma once

#include "kernels/device.h"

// FLOP/s of the best of a few products. They are of n x n matrices of Storage, any storage type, with the
// first n whose product lasts long enough to be timed, 1024 on a laptop. Takes its memory and frees it again.
template <typename Storage>
double measure_matmul_ceiling(Stream* stream);
