// cuBLASLt on the host: plain loops with fp32 sums in the order of k, and the refusals of the real library.
//
// What is refused, with the status that the documentation gives, follows the cuBLAS documentation,
// https://docs.nvidia.com/cuda/cublas/#cublasltmatmul: its table of types and epilogues, its requirements on
// C and D, the workspace's alignment and size. Beyond that the stand-in is as strict as any algorithm may be:
// the algorithm works only for the problem it was chosen for, on pointers as aligned as was promised then,
// and it needs a workspace that grows with the batch, and leaves rubbish in it.
//
// Every operand is copied to fp32, so one loop serves all types, orders and transposes. The loop is fast
// enough for whole small models if this file is compiled with -O2 and no sanitizer: will_read and will_write
// check the memory.
#include "cublasLt.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cudasim.h"

struct cublasLtContext {};

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t leading_dimension;
    int32_t order = CUBLASLT_ORDER_COL;
    int32_t batch = 1;
    int64_t batch_offset = 0;

    bool operator==(const cublasLtMatrixLayoutOpaque_t&) const = default;
};

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute_type;
    cudaDataType_t scale_type;
    int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr;
    void* aux = nullptr;
    int64_t aux_leading_dimension = 0;
};

struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace_bytes = 0;
    uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

namespace {

using Layout = cublasLtMatrixLayoutOpaque_t;
using Description = cublasLtMatmulDescOpaque_t;

constexpr const char* name = "cublasLtMatmul";
constexpr size_t workspace_alignment = 256;

size_t element_bytes(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

// ---------------------------------------------------------------------------------------------------
// What is refused

// The rows of the table "computeType, scaleType, Atype/Btype, Ctype" for the types that this header has. The
// fifth column says that each of them takes the epilogues, with a bias of Ctype.
bool types_supported(cublasComputeType_t compute, cudaDataType_t scale, cudaDataType_t input,
                     cudaDataType_t output) {
    switch (compute) {
        case CUBLAS_COMPUTE_16F:
            return scale == CUDA_R_16F && input == CUDA_R_16F && output == CUDA_R_16F;
        case CUBLAS_COMPUTE_32F:
        case CUBLAS_COMPUTE_32F_PEDANTIC:
            if (scale != CUDA_R_32F) return false;
            if (input == CUDA_R_32F) return output == CUDA_R_32F;
            if (input != CUDA_R_16BF && input != CUDA_R_16F) return false;
            return output == input || output == CUDA_R_32F;
        case CUBLAS_COMPUTE_32F_FAST_16F:
        case CUBLAS_COMPUTE_32F_FAST_16BF:
        case CUBLAS_COMPUTE_32F_FAST_TF32:
            return scale == CUDA_R_32F && input == CUDA_R_32F && output == CUDA_R_32F;
    }
    return false;
}

bool uses_bias(const Description& description) { return (description.epilogue & 4) != 0; }
bool uses_aux(const Description& description) { return (description.epilogue & 128) != 0; }

// Columns of a column-major matrix, rows of a row-major one: what lies in one piece.
uint64_t line_length(const Layout& layout) {
    return layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.columns;
}
uint64_t line_count(const Layout& layout) {
    return layout.order == CUBLASLT_ORDER_COL ? layout.columns : layout.rows;
}
size_t matrix_elements(const Layout& layout) {
    return (line_count(layout) - 1) * static_cast<size_t>(layout.leading_dimension) + line_length(layout);
}

cublasStatus_t check_layout(const Layout& layout) {
    if (layout.rows == 0 || layout.columns == 0 || layout.batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout.order != CUBLASLT_ORDER_COL && layout.order != CUBLASLT_ORDER_ROW) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (layout.leading_dimension < 0 ||
        static_cast<uint64_t>(layout.leading_dimension) < line_length(layout)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_problem(const Description* description, const Layout* a, const Layout* b,
                             const Layout* c, const Layout* d) {
    if (description == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout* layout : {a, b, c, d}) {
        if (layout == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
        const cublasStatus_t status = check_layout(*layout);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        if (layout->batch != d->batch) return CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool ta = description->transpose_a == CUBLAS_OP_T, tb = description->transpose_b == CUBLAS_OP_T;
    const uint64_t k = ta ? a->rows : a->columns;
    if ((ta ? a->columns : a->rows) != d->rows || (tb ? b->rows : b->columns) != d->columns ||
        (tb ? b->columns : b->rows) != k || c->rows != d->rows || c->columns != d->columns) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (d->batch > 1 && static_cast<size_t>(std::abs(d->batch_offset)) < matrix_elements(*d)) {
        return CUBLAS_STATUS_INVALID_VALUE;  // the results would overlap
    }
    // "C != D, both matrices must have the same data type, number of rows, number of columns, batch size, and
    // memory order".
    if (c->order != d->order || c->type != d->type) return CUBLAS_STATUS_INVALID_VALUE;
    if (a->type != b->type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!types_supported(description->compute_type, description->scale_type, a->type, d->type)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    switch (description->epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT:
            return CUBLAS_STATUS_SUCCESS;
        case CUBLASLT_EPILOGUE_BIAS:
            break;
        case CUBLASLT_EPILOGUE_GELU:
        case CUBLASLT_EPILOGUE_GELU_BIAS:
        case CUBLASLT_EPILOGUE_GELU_AUX:
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        case CUBLASLT_EPILOGUE_DGELU:
            // Note 6: these "are not supported when D matrix memory order is defined as CUBLASLT_ORDER_ROW".
            if (d->order == CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
            break;
        default:
            return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (d->batch > 1) return CUBLAS_STATUS_NOT_SUPPORTED;  // the strides of bias and aux are not simulated
    // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: "divisible by 8 and no less than the number of rows".
    const int64_t aux_ld = description->aux_leading_dimension;
    if (uses_aux(*description) && (aux_ld % 8 != 0 || aux_ld < static_cast<int64_t>(d->rows))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* pointer, size_t alignment) {
    return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// ---------------------------------------------------------------------------------------------------
// An algorithm: what it was chosen for, and its workspace for one matrix

uint64_t fingerprint(const Description& description, const Layout& a, const Layout& b, const Layout& d) {
    uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, a word at a time
    const auto add = [&hash](auto value) { hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3u; };
    add(description.compute_type);
    add(description.transpose_a);
    add(description.transpose_b);
    add(description.epilogue);
    for (const Layout& layout : {a, b, d}) {
        add(layout.type);
        add(layout.order);
        add(layout.rows);
        add(layout.columns);
        add(layout.leading_dimension);
    }
    return hash;
}

struct Algorithm {
    uint64_t fingerprint;
    uint64_t workspace_bytes;  // a matrix
    uint32_t alignment[4];     // of A, B, C, D
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

Algorithm read(const cublasLtMatmulAlgo_t& opaque) {
    Algorithm algorithm;
    memcpy(&algorithm, &opaque, sizeof(algorithm));
    return algorithm;
}

// ---------------------------------------------------------------------------------------------------
// The product

void announce(const void* memory, const Layout& layout, bool write) {
    const size_t line = line_length(layout) * element_bytes(layout.type);
    const char* matrix = static_cast<const char*>(memory);
    for (int32_t l = 0; l < layout.batch; ++l) {
        const size_t first = static_cast<size_t>(l) * static_cast<size_t>(layout.batch_offset);
        for (uint64_t i = 0; i < line_count(layout); ++i) {
            const size_t offset = first + i * static_cast<size_t>(layout.leading_dimension);
            const char* start = matrix + offset * element_bytes(layout.type);
            if (write) {
                cudasim::will_write(const_cast<char*>(start), line, name);
            } else {
                cudasim::will_read(start, line, name);
            }
        }
    }
}

float load(const void* memory, size_t i, cudaDataType_t type) {
    switch (type) {
        case CUDA_R_16BF:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(memory)[i]);
        case CUDA_R_16F:
            return __half2float(static_cast<const __half*>(memory)[i]);
        default:
            return static_cast<const float*>(memory)[i];
    }
}

void store(void* memory, size_t i, cudaDataType_t type, float value) {
    switch (type) {
        case CUDA_R_16BF:
            static_cast<__nv_bfloat16*>(memory)[i] = __float2bfloat16_rn(value);
            break;
        case CUDA_R_16F:
            static_cast<__half*>(memory)[i] = __float2half_rn(value);
            break;
        default:
            static_cast<float*>(memory)[i] = value;
    }
}

// Where element (row, column) of matrix l lies.
size_t place(const Layout& layout, int32_t l, size_t row, size_t column) {
    const size_t ld = static_cast<size_t>(layout.leading_dimension);
    const size_t first = static_cast<size_t>(l) * static_cast<size_t>(layout.batch_offset);
    return first + (layout.order == CUBLASLT_ORDER_COL ? column * ld + row : row * ld + column);
}

// op(matrix l) in fp32, column-major without gaps.
std::vector<float> to_floats(const void* memory, const Layout& layout, int32_t l, bool transpose) {
    const size_t rows = transpose ? layout.columns : layout.rows;
    const size_t columns = transpose ? layout.rows : layout.columns;
    std::vector<float> result(rows * columns);
    for (size_t j = 0; j < columns; ++j) {
        for (size_t i = 0; i < rows; ++i) {
            const size_t from = transpose ? place(layout, l, j, i) : place(layout, l, i, j);
            result[j * rows + i] = load(memory, from, layout.type);
        }
    }
    return result;
}

// fp32 with 10 bits of fraction, to nearest: what tensor cores take of an fp32 number.
float round_to_tf32(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return std::isfinite(x) ? std::bit_cast<float>((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu) : x;
}

// The tanh approximation (arXiv:1606.08415), which is cuBLASLt's GELU, and its derivative.
float gelu(float x) {
    const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    return static_cast<float>(0.5 * x * (1 + std::tanh(u)));
}
float gelu_derivative(float x_) {
    const double x = x_, t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    const double du = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    return static_cast<float>(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du);
}

// A call, copied when it is made: the caller may reuse descriptors and scalars at once.
struct Call {
    Description description;
    Layout a, b, c, d;
    const void *A, *B, *C;
    void *D, *workspace;
    size_t workspace_bytes;  // that the algorithm uses
    float alpha, beta;
};

float finish(const Call& call, int32_t l, size_t row, size_t column, float sum) {
    float value = call.alpha * sum;
    if (call.beta != 0) value += call.beta * load(call.C, place(call.c, l, row, column), call.c.type);
    if (uses_bias(call.description)) value += load(call.description.bias, row, call.d.type);
    const size_t aux_place = column * static_cast<size_t>(call.description.aux_leading_dimension) + row;
    if (call.description.epilogue == CUBLASLT_EPILOGUE_DGELU) {
        return value * gelu_derivative(load(call.description.aux, aux_place, call.d.type));
    }
    if (uses_aux(call.description)) store(call.description.aux, aux_place, call.d.type, value);
    return (call.description.epilogue & CUBLASLT_EPILOGUE_GELU) != 0 ? gelu(value) : value;
}

void multiply(const Call& call) {
    const size_t m = call.d.rows, n = call.d.columns;
    const bool ta = call.description.transpose_a == CUBLAS_OP_T;
    const bool tb = call.description.transpose_b == CUBLAS_OP_T;
    const size_t k = ta ? call.a.rows : call.a.columns;
    for (int32_t l = 0; l < call.d.batch; ++l) {
        std::vector<float> a = to_floats(call.A, call.a, l, ta), b = to_floats(call.B, call.b, l, tb);
        if (call.description.compute_type == CUBLAS_COMPUTE_32F_FAST_TF32) {
            std::transform(a.begin(), a.end(), a.begin(), round_to_tf32);
            std::transform(b.begin(), b.end(), b.begin(), round_to_tf32);
        }
#pragma omp parallel if (m * n * k > 100000)
        {
            std::vector<float> sums(m);
#pragma omp for
            for (size_t j = 0; j < n; ++j) {
                std::fill(sums.begin(), sums.end(), 0.0f);
                for (size_t p = 0; p < k; ++p) {
                    const float factor = b[j * k + p];
                    const float* const column = a.data() + p * m;
#pragma omp simd
                    for (size_t i = 0; i < m; ++i) sums[i] += column[i] * factor;
                }
                for (size_t i = 0; i < m; ++i) {
                    store(call.D, place(call.d, l, i, j), call.d.type, finish(call, l, i, j, sums[i]));
                }
            }
        }
    }
}

void run(const Call& call) {
    announce(call.A, call.a, false);
    announce(call.B, call.b, false);
    if (call.beta != 0) announce(call.C, call.c, false);
    const size_t output_bytes = element_bytes(call.d.type);
    if (uses_bias(call.description)) {
        cudasim::will_read(call.description.bias, call.d.rows * output_bytes, name);
    }
    if (uses_aux(call.description)) {
        Layout aux = call.d;
        aux.leading_dimension = call.description.aux_leading_dimension;
        announce(call.description.aux, aux, call.description.epilogue != CUBLASLT_EPILOGUE_DGELU);
    }
    // Rubbish in a few KiB of the workspace is enough to spoil what somebody keeps there.
    const size_t spoilt = std::min(call.workspace_bytes, size_t{16384});
    if (spoilt != 0) {
        cudasim::will_write(call.workspace, spoilt, name);
        memset(call.workspace, 0xff, spoilt);
    }
    announce(call.D, call.d, true);
    multiply(call);
}

bool overlap(const void* x, const Layout& x_layout, const void* y, const Layout& y_layout) {
    const auto bytes = [](const Layout& layout) {
        const size_t batches =
            static_cast<size_t>(layout.batch - 1) * static_cast<size_t>(layout.batch_offset);
        return (batches + matrix_elements(layout)) * element_bytes(layout.type);
    };
    const char *x_ = static_cast<const char*>(x), *y_ = static_cast<const char*>(y);
    return x_ < y_ + bytes(y_layout) && y_ < x_ + bytes(x_layout);
}

template <typename Value>
cublasStatus_t set(Value& attribute, const void* value, size_t bytes) {
    if (value == nullptr || bytes != sizeof(Value)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename Object>
cublasStatus_t destroy(Object* object) {
    delete object;
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// The calls

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "the library was not initialized";
        case CUBLAS_STATUS_ALLOC_FAILED:
            return "the resource allocation failed";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "an unsupported value or parameter was passed to the function";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "the requested functionality is not supported";
        default:
            return "an internal error";
    }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    int devices = 0;
    *handle = nullptr;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasLtContext;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t leading_dimension) {
    *layout = new Layout{type, rows, columns, leading_dimension};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_ORDER:
            return set(layout->order, value, bytes);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
            return set(layout->batch, value, bytes);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
            return set(layout->batch_offset, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute_type,
                                        cudaDataType_t scale_type) {
    *description = new Description{compute_type, scale_type};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) { return destroy(description); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA:
            return set(description->transpose_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB:
            return set(description->transpose_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE:
            return set(description->epilogue, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
            return set(description->bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
            return set(description->aux, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
            return set(description->aux_leading_dimension, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = new cublasLtMatmulPreferenceOpaque_t;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
            return set(preference->workspace_bytes, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
            return set(preference->reduction_schemes, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
            return set(preference->alignment[0], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
            return set(preference->alignment[1], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
            return set(preference->alignment[2], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
            return set(preference->alignment[3], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

// One algorithm, which takes an eighth of the workspace allowed: a batch of more than eight has to be split.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most_results,
                                              cublasLtMatmulHeuristicResult_t results[], int* result_count) {
    *result_count = 0;
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (preference == nullptr || most_results < 1) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t status = check_problem(description, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;

    const Layout* const layouts[] = {a, b, c, d};
    const size_t batch = static_cast<size_t>(d->batch);
    Algorithm algorithm = {};
    algorithm.fingerprint = fingerprint(*description, *a, *b, *d);
    algorithm.workspace_bytes =
        preference->workspace_bytes / 8 / batch / workspace_alignment * workspace_alignment;
    for (int i = 0; i < 4; ++i) {
        if (preference->alignment[i] < element_bytes(layouts[i]->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
        algorithm.alignment[i] = preference->alignment[i];
    }
    results[0] = {};
    memcpy(&results[0].algo, &algorithm, sizeof(algorithm));
    results[0].workspaceSize = algorithm.workspace_bytes * batch;
    results[0].wavesCount = 1;
    *result_count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (algorithm == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t status = check_problem(description, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const Algorithm chosen = read(*algorithm);
    if (chosen.fingerprint != fingerprint(*description, *a, *b, *d)) return CUBLAS_STATUS_INVALID_VALUE;
    result->workspaceSize = chosen.workspace_bytes * static_cast<size_t>(d->batch);
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cudasim::ProductRequest& cudasim::last_product() {
    static thread_local ProductRequest last = {};
    return last;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    cublasLtMatmulHeuristicResult_t needs;
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, description, a, b, c, d, algorithm, &needs);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (alpha == nullptr || beta == nullptr || A == nullptr || B == nullptr || C == nullptr || D == nullptr) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    // Fp16 sums, with fp16 scalars, are in the table but not here.
    if (description->compute_type == CUBLAS_COMPUTE_16F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (needs.workspaceSize > workspace_bytes || !aligned(workspace, workspace_alignment)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const Algorithm chosen = read(*algorithm);
    const void* const matrices[] = {A, B, C, D};
    const Layout* const layouts[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        const size_t offset = static_cast<size_t>(layouts[i]->batch_offset) * element_bytes(layouts[i]->type);
        if (!aligned(matrices[i], chosen.alignment[i]) ||
            (layouts[i]->batch > 1 && offset % chosen.alignment[i] != 0)) {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
    }
    // The heuristic does not ask for these two's alignment, so an algorithm may count on the most it can use.
    if (uses_bias(*description) && (description->bias == nullptr || !aligned(description->bias, 16))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (uses_aux(*description) && (description->aux == nullptr || !aligned(description->aux, 16))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (C == D && !(*c == *d)) return CUBLAS_STATUS_INVALID_VALUE;
    // The real library computes rubbish in these cases.
    if (overlap(D, *d, A, *a) || overlap(D, *d, B, *b) || (C != D && overlap(D, *d, C, *c))) {
        cudasim::fault("%s: D overlaps A, B or C", name);
    }

    cudasim::last_product() = {description->compute_type, description->epilogue};
    const Call call = {*description,
                       *a,
                       *b,
                       *c,
                       *d,
                       A,
                       B,
                       C,
                       D,
                       workspace,
                       needs.workspaceSize,
                       *static_cast<const float*>(alpha),
                       *static_cast<const float*>(beta)};
    cudasim::enqueue(stream, name, false, [call] { run(call); });
    return CUBLAS_STATUS_SUCCESS;
}
