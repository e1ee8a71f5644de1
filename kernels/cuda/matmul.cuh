// Matrix products by cuBLASLt, for row-major matrices without gaps.
//
// Everything that a product needs beside its pointers is found once and kept in the Stream: descriptors and
// the algorithm. The algorithm is cuBLASLt's own first proposal for ONE matrix, given the shape, the types,
// the alignment and the fixed workspace; nothing is timed, and the batch is never told. So the bits of a
// product depend on its matrices and the device model alone, not on the run or on the batch they stand in.
//
// cuBLASLt thinks in columns: our row-major (rows,columns) matrix is its column-major (columns,rows) one. So
// it is asked for the transposed product, D^T = op(B)^T op(A)^T, and no data moves.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/stream.h"
#include "kernels/dtype.h"
#include "kernels/error.h"

// Fails with cuBLASLt's own words, the call and its place.
inline void cublas_check(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fail("%s:%d: %s: cuBLASLt: %s", file, line, call, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)

// What cuBLASLt does to a sum before it stores it.
enum class Epilogue {
    none,
    bias,             // d = sum + bias
    bias_gelu,        // aux = sum + bias; d = gelu(aux)
    gelu_derivative,  // d = sum * gelu'(aux)
};

// For each of `batch` contiguous matrices: d = alpha * op(a) * op(b) + beta * c, where op transposes if
// asked; then the epilogue. op(a) (m,k), op(b) (k,n), c, d and aux (m,n), bias (n).
template <typename Input, typename Output>
struct Matmul {
    Output* d;
    const Input* a;
    const Input* b;
    const Output* c = nullptr;  // null: d itself, whose old contents are then read only if beta is not 0
    bool transpose_a = false, transpose_b = false;
    size_t m, n, k, batch = 1;
    float alpha = 1, beta = 0;
    Epilogue epilogue = Epilogue::none;  // others only for a batch of 1
    const Output* bias = nullptr;        // this and aux aligned to 16 bytes
    Output* aux = nullptr;               // n must be a multiple of 8
};

// Input is float, bf16_t or fp16_t; Output is Input or float. Sums are fp32. Fails if cuBLASLt refuses.
template <typename Input, typename Output>
void matmul(const Matmul<Input, Output>& product, Stream* stream);
