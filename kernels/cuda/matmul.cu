// cublasLtMatmul with everything about a product cached; see matmul.cuh.
#include "kernels/cuda/matmul.cuh"

#include <compare>
#include <limits>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

namespace {

// ---------------------------------------------------------------------------------------------------
// What tells one product from another

enum Operand { operand_a, operand_b, operand_c, operand_d };

struct Problem {
    cudaDataType_t input, output;
    cublasComputeType_t compute;
    Epilogue epilogue;
    bool transpose_a, transpose_b;
    size_t m, n, k, batch;
    uint32_t alignment[4];  // of every matrix of the batch, in bytes; by Operand

    auto operator<=>(const Problem&) const = default;
};

template <typename Storage>
constexpr cudaDataType_t cuda_type() {
    constexpr Dtype dtype = dtype_of<Storage>();
    return dtype == Dtype::fp32 ? CUDA_R_32F : dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

// The alignment that matrix 0 and all after it share. The size counts for a batch of 1 too: a matrix alone
// must get the algorithm that it gets as the 2nd of a batch.
template <typename Storage>
uint32_t alignment_of(const Storage* matrices, size_t elements) {
    const size_t bits = reinterpret_cast<uintptr_t>(matrices) | elements * sizeof(Storage) | 256;
    return static_cast<uint32_t>(bits & (~bits + 1));  // the lowest bit
}

template <typename Input, typename Output>
Problem problem_of(const Matmul<Input, Output>& product, const Output* c, bool tf32) {
    const size_t m = product.m, n = product.n, k = product.k;
    // CUBLAS_COMPUTE_32F keeps all bits of fp32 inputs.
    const bool round_inputs = tf32 && std::is_same_v<Input, float>;
    return {.input = cuda_type<Input>(),
            .output = cuda_type<Output>(),
            .compute = round_inputs ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
            .epilogue = product.epilogue,
            .transpose_a = product.transpose_a,
            .transpose_b = product.transpose_b,
            .m = m,
            .n = n,
            .k = k,
            .batch = product.batch,
            .alignment = {alignment_of(product.a, m * k), alignment_of(product.b, k * n),
                          alignment_of(c, m * n), alignment_of(product.d, m * n)}};
}

// ---------------------------------------------------------------------------------------------------
// cuBLASLt's objects, destroyed with their owner

template <auto destroy>
struct Destroy {
    template <typename Object>
    void operator()(Object* object) const {
        destroy(object);
    }
};
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

// Of `batch` row-major (rows,columns) matrices.
Layout make_layout(cudaDataType_t type, size_t rows, size_t columns, size_t batch) {
    cublasLtMatrixLayout_t layout = nullptr;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, columns, rows, static_cast<int64_t>(columns)));
    Layout result(layout);
    const int32_t count = static_cast<int32_t>(batch);
    const int64_t offset = static_cast<int64_t>(rows * columns);
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                  &offset, sizeof(offset)));
    return result;
}

template <typename Value>
void set(const Description& description, cublasLtMatmulDescAttributes_t attribute, Value value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description.get(), attribute, &value, sizeof(value)));
}

bool has_bias(Epilogue epilogue) { return epilogue == Epilogue::bias || epilogue == Epilogue::bias_gelu; }
bool has_aux(Epilogue epilogue) {
    return epilogue == Epilogue::bias_gelu || epilogue == Epilogue::gelu_derivative;
}

cublasLtEpilogue_t cublas_epilogue(Epilogue epilogue) {
    switch (epilogue) {
        case Epilogue::bias:
            return CUBLASLT_EPILOGUE_BIAS;
        case Epilogue::bias_gelu:
            return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        case Epilogue::gelu_derivative:
            return CUBLASLT_EPILOGUE_DGELU;
        default:
            return CUBLASLT_EPILOGUE_DEFAULT;
    }
}

// Where our b is their A.
Description make_description(const Problem& problem) {
    cublasLtMatmulDesc_t pointer = nullptr;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&pointer, problem.compute, CUDA_R_32F));
    Description result(pointer);
    set<int32_t>(result, CUBLASLT_MATMUL_DESC_TRANSA, problem.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<int32_t>(result, CUBLASLT_MATMUL_DESC_TRANSB, problem.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<uint32_t>(result, CUBLASLT_MATMUL_DESC_EPILOGUE, cublas_epilogue(problem.epilogue));
    // The heuristic takes the alignment of these two from their values.
    void* const aligned_to_16 = reinterpret_cast<void*>(uintptr_t{16});
    if (has_bias(problem.epilogue)) {
        set<const void*>(result, CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned_to_16);
    }
    if (has_aux(problem.epilogue)) {
        set<void*>(result, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aligned_to_16);
        set<int64_t>(result, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(problem.n));
    }
    return result;
}

// The most that an algorithm may work in. Its choice may depend on this, so it never changes; 32 MiB is what
// NVIDIA recommends for Hopper (cuBLAS documentation, "cublasSetWorkspace").
constexpr size_t most_workspace_bytes = size_t{32} << 20;

Preference make_preference(const Problem& problem) {
    cublasLtMatmulPreference_t pointer = nullptr;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&pointer));
    Preference result(pointer);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(pointer, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{most_workspace_bytes});
    // Where k is split over blocks, partial sums stay in fp32: never in a 16-bit output.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.alignment[operand_b]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.alignment[operand_a]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.alignment[operand_c]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.alignment[operand_d]);
    return result;
}

// All that cublasLtMatmul wants to know of `batch` products.
struct Descriptors {
    Description description;
    Layout a, b, d;  // c lies as d does

    Descriptors(const Problem& problem, size_t batch)
        : description(make_description(problem)),
          a(problem.transpose_a ? make_layout(problem.input, problem.k, problem.m, batch)
                                : make_layout(problem.input, problem.m, problem.k, batch)),
          b(problem.transpose_b ? make_layout(problem.input, problem.n, problem.k, batch)
                                : make_layout(problem.input, problem.k, problem.n, batch)),
          d(make_layout(problem.output, problem.m, problem.n, batch)) {}
};

// ---------------------------------------------------------------------------------------------------
// How a product is computed

struct Plan {
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes;
    size_t step;  // matrices a call: a divisor of the batch
    Descriptors descriptors;
};

cublasLtMatmulHeuristicResult_t first_proposal(const Problem& problem, const Descriptors& one,
                                               Stream* stream) {
    const Preference preference = make_preference(problem);
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(stream->lt, one.description.get(), one.b.get(), one.a.get(),
                                       one.d.get(), one.d.get(), preference.get(), 1, &result, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0 || result.state != CUBLAS_STATUS_SUCCESS) {
        fail("matmul %zu x %zu x %zu: cuBLASLt has no algorithm: %s", problem.m, problem.n, problem.k,
             cublasLtGetStatusString(status != CUBLAS_STATUS_SUCCESS ? status : CUBLAS_STATUS_NOT_SUPPORTED));
    }
    return result;
}

// The workspace that the algorithm needs for this batch; nothing if it does not take it.
std::optional<size_t> workspace_needed(const cublasLtMatmulAlgo_t& algorithm, const Descriptors& of,
                                       const Stream* stream) {
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(stream->lt, of.description.get(), of.b.get(), of.a.get(), of.d.get(),
                                of.d.get(), &algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > most_workspace_bytes) return std::nullopt;
    return result.workspaceSize;
}

}  // namespace

struct MatmulPlans {
    std::map<Problem, Plan> plans;
};

namespace {

const Plan& find_plan(const Problem& problem, Stream* stream) {
    if (stream->matmul_plans == nullptr) stream->matmul_plans = std::make_shared<MatmulPlans>();
    std::map<Problem, Plan>& plans = stream->matmul_plans->plans;
    if (const auto found = plans.find(problem); found != plans.end()) return found->second;
    const auto keep = [&](Plan&& plan) -> const Plan& {
        return plans.emplace(problem, std::move(plan)).first->second;
    };

    if (problem.batch == 1) {
        Descriptors one(problem, 1);
        const cublasLtMatmulHeuristicResult_t proposal = first_proposal(problem, one, stream);
        return keep({proposal.algo, proposal.workspaceSize, 1, std::move(one)});
    }
    Problem alone = problem;
    alone.batch = 1;
    const Plan& plan_of_one = find_plan(alone, stream);  // a map leaves its entries where they are
    // The algorithm may want the workspace once for each matrix, or know no batches: then in several calls.
    for (size_t step = problem.batch; step > 1; --step) {
        if (problem.batch % step != 0) continue;
        Descriptors descriptors(problem, step);
        const auto workspace_bytes = workspace_needed(plan_of_one.algorithm, descriptors, stream);
        if (workspace_bytes) {
            return keep({plan_of_one.algorithm, *workspace_bytes, step, std::move(descriptors)});
        }
    }
    return keep({plan_of_one.algorithm, plan_of_one.workspace_bytes, 1, Descriptors(problem, 1)});
}

}  // namespace

template <typename Input, typename Output>
void matmul(const Matmul<Input, Output>& product, Stream* stream) {
    const size_t m = product.m, n = product.n, k = product.k;
    if (product.batch > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        fail("matmul: a batch of %zu matrices", product.batch);
    const Output* const c = product.c == nullptr ? product.d : product.c;
    const Plan& plan = find_plan(problem_of(product, c, stream->tf32), stream);
    const Descriptors& of = plan.descriptors;
    if (has_bias(product.epilogue))
        set<const void*>(of.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    if (has_aux(product.epilogue))
        set<void*>(of.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, product.aux);
    void* const workspace = device_scratch(stream, plan.workspace_bytes);
    for (size_t l = 0; l < product.batch; l += plan.step) {
        CUBLAS_CHECK(cublasLtMatmul(stream->lt, of.description.get(), &product.alpha, product.b + l * k * n,
                                    of.b.get(), product.a + l * m * k, of.a.get(), &product.beta,
                                    c + l * m * n, of.d.get(), product.d + l * m * n, of.d.get(),
                                    &plan.algorithm, workspace, plan.workspace_bytes, stream->stream));
    }
}

template void matmul(const Matmul<float, float>&, Stream*);
template void matmul(const Matmul<bf16_t, bf16_t>&, Stream*);
template void matmul(const Matmul<bf16_t, float>&, Stream*);
template void matmul(const Matmul<fp16_t, fp16_t>&, Stream*);
template void matmul(const Matmul<fp16_t, float>&, Stream*);
