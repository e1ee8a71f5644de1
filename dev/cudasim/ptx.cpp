// mma, ldmatrix and cp.async on the host, from the tables of the PTX ISA.
#include <bit>
#include <cstring>

#include "kernels/dtype.h"
#include "memory.h"
#include "ptx_tables.h"

namespace cudasim {
namespace {

// Half `element` of a row of 32-bit registers.
uint16_t half_of(const uint32_t* registers, unsigned element) {
    return static_cast<uint16_t>(registers[element / 2] >> (element % 2 * 16));
}

float widen(uint16_t bits, HalfType type) {
    return type == HalfType::bf16 ? to_float(bf16_t{bits}) : to_float(fp16_t{bits});
}

// ---------------------------------------------------------------------------------------------------
// mma

struct Product {
    float* acc;
    const uint32_t* a;
    uint32_t b[2];
};

// Products of 16-bit numbers are exact in fp32; their sum is taken in order of k. Hardware's order and the
// rounding inside of it are not specified.
template <HalfType type>
void act_mma(void* const operands[warp_size], unsigned) {
    const auto lane = [&](unsigned i) -> Product& { return *static_cast<Product*>(operands[i]); };
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; ++k) {
            a[i][k] = widen(half_of(lane(mma_a_lane[i][k]).a, mma_a_element[i][k]), type);
        }
        for (int j = 0; j < 8; ++j) {
            b[i][j] = widen(half_of(lane(mma_b_lane[i][j]).b, mma_b_element[i][j]), type);
            c[i][j] = lane(mma_c_lane[i][j]).acc[mma_c_element[i][j]];
        }
    }
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; ++k) {
            for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
        }
        for (int j = 0; j < 8; ++j) lane(mma_c_lane[i][j]).acc[mma_c_element[i][j]] = c[i][j];
    }
}

// ---------------------------------------------------------------------------------------------------
// ldmatrix

struct MatrixLoad {
    uint32_t* d;
    const void* row;
};

template <bool transposed>
void act_ldmatrix(void* const operands[warp_size], unsigned) {
    const auto lane = [&](unsigned i) -> MatrixLoad& { return *static_cast<MatrixLoad*>(operands[i]); };
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        uint16_t m[8][8];
        for (unsigned r = 0; r < 8; ++r) memcpy(m[r], lane(8 * matrix + r).row, sizeof(m[r]));
        for (unsigned r = 0; r < 8; ++r) {
            for (unsigned c = 0; c < 8; ++c) {
                uint32_t& to = lane(ldmatrix_lane[r][c]).d[matrix];
                const unsigned shift = ldmatrix_element[r][c] * 16u;
                to = (to & ~(0xffffu << shift)) | static_cast<uint32_t>(transposed ? m[c][r] : m[r][c])
                                                      << shift;
            }
        }
    }
}

constexpr unsigned whole_warp = 0xffffffffu;

}  // namespace

void mma_m16n8k16(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1, HalfType type, Where where) {
    Product mine = {acc, a, {b0, b1}};
    warp_collective("mma", whole_warp, &mine,
                    type == HalfType::bf16 ? act_mma<HalfType::bf16> : act_mma<HalfType::fp16>, where);
}

void ldmatrix_x4(uint32_t* d, const void* row, bool transposed, Where where) {
    if (!is_shared_memory(row)) fault_at(where, "ldmatrix from %s", describe_address(row).c_str());
    check_access(row, 16, false);
    MatrixLoad mine = {d, row};
    warp_collective("ldmatrix", whole_warp, &mine, transposed ? act_ldmatrix<true> : act_ldmatrix<false>,
                    where);
}

// ---------------------------------------------------------------------------------------------------
// cp.async: nothing lands before its wait, and until then its target counts as not written

void cp_async_16(void* shared, const void* global, unsigned source_bytes) {
    if (!is_shared_memory(shared)) fault("cp.async to %s", describe_address(shared).c_str());
    check_access(shared, 16, true);
    set_state(shared, 16, State::in_flight);
    if (source_bytes != 0) {
        if (!is_device_memory(global) || is_shared_memory(global)) {
            fault("cp.async from %s", describe_address(global).c_str());
        }
        check_access(global, source_bytes, false);
    }
    auto& groups = running()->async_groups;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({shared, global, source_bytes});
}

void cp_async_commit() {
    auto& groups = running()->async_groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

void cp_async_wait(unsigned groups_that_may_be_pending) {
    auto& groups = running()->async_groups;
    while (groups.size() > groups_that_may_be_pending + 1) {  // the last one is open, and not waited for
        for (const AsyncCopy& copy : groups.front()) {
            check_access(copy.shared, 16, true);
            memset(copy.shared, 0, 16);
            if (copy.source_bytes != 0) memcpy(copy.shared, copy.global, copy.source_bytes);
        }
        groups.erase(groups.begin());
    }
}

}  // namespace cudasim
