// The simulator's cuBLASLt: its products against a textbook product in double over every order, transpose,
// gap between lines and batch, its epilogues against textbook GELU, and what it must refuse.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "dev/test/reference.h"
#include "kernels/dtype.h"

namespace {

// D = alpha op(A) op(B) + beta C of a small fixed size, with every detail open to change.
constexpr size_t m = 8, n = 5, k = 7;

struct Operand {
    cudaDataType_t type = CUDA_R_32F;
    int32_t order = CUBLASLT_ORDER_COL;
    size_t rows = 0, columns = 0;
    int64_t gap = 0;  // unused elements behind each column, or row
    int32_t batch = 1;
    int64_t batch_gap = 0;
    std::vector<float> values;  // column-major, one matrix after the other

    size_t line() const { return order == CUBLASLT_ORDER_COL ? rows : columns; }
    int64_t leading_dimension() const { return static_cast<int64_t>(line()) + gap; }
    int64_t batch_offset() const {
        return leading_dimension() * static_cast<int64_t>(order == CUBLASLT_ORDER_COL ? columns : rows) +
               batch_gap;
    }
    size_t elements() const { return static_cast<size_t>(batch_offset()) * static_cast<size_t>(batch); }
    size_t element_bytes() const { return type == CUDA_R_32F ? 4 : 2; }
    size_t place(size_t l, size_t i, size_t j) const {
        const size_t ld = static_cast<size_t>(leading_dimension());
        return l * static_cast<size_t>(batch_offset()) +
               (order == CUBLASLT_ORDER_COL ? j * ld + i : i * ld + j);
    }
};

// The float that is stored.
float round_to(cudaDataType_t type, float x) {
    if (type == CUDA_R_16BF) return to_float(from_float<bf16_t>(x));
    if (type == CUDA_R_16F) return to_float(from_float<fp16_t>(x));
    return x;
}
uint32_t bits_of(cudaDataType_t type, float x) {
    if (type == CUDA_R_16BF) return from_float<bf16_t>(x).bits;
    if (type == CUDA_R_16F) return from_float<fp16_t>(x).bits;
    return std::bit_cast<uint32_t>(x);
}

// An operand in device memory; gaps are never written, so that reading one is a fault.
char* to_device(const Operand& operand) {
    char* memory = nullptr;
    const size_t spare = 64;  // where the tests of refusals spoil the sizes
    EXPECT_EQ(cudaMalloc(&memory, (operand.elements() + spare) * operand.element_bytes()), cudaSuccess);
    const size_t matrix = operand.rows * operand.columns;
    for (size_t i = 0; i < operand.values.size(); ++i) {
        const size_t place = operand.place(i / matrix, i % matrix % operand.rows, i % matrix / operand.rows);
        const uint32_t bits = bits_of(operand.type, operand.values[i]);
        cudaMemcpy(memory + place * operand.element_bytes(), &bits, operand.element_bytes(),
                   cudaMemcpyHostToDevice);
    }
    return memory;
}

std::vector<float> to_host(const Operand& operand, const char* memory) {
    std::vector<float> result(operand.rows * operand.columns * static_cast<size_t>(operand.batch));
    const size_t matrix = operand.rows * operand.columns;
    for (size_t i = 0; i < result.size(); ++i) {
        const size_t place = operand.place(i / matrix, i % matrix % operand.rows, i % matrix / operand.rows);
        uint32_t bits = 0;
        cudaMemcpy(&bits, memory + place * operand.element_bytes(), operand.element_bytes(),
                   cudaMemcpyDeviceToHost);
        const uint16_t half = static_cast<uint16_t>(bits);
        result[i] = operand.type == CUDA_R_16BF  ? to_float(bf16_t{half})
                    : operand.type == CUDA_R_16F ? to_float(fp16_t{half})
                                                 : std::bit_cast<float>(bits);
    }
    return result;
}

struct Call {
    Operand a, b, c, d;
    bool transpose_a = false, transpose_b = false, in_place = false;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    cudaDataType_t scale = CUDA_R_32F;
    float alpha = 1, beta = 0;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    std::vector<float> bias, aux;  // aux is column-major
    int64_t aux_leading_dimension = m;
    // For refusals:
    uint64_t max_workspace = 1 << 20;
    size_t given_workspace = 1 << 20, workspace_shift = 0, a_shift = 0;
    uint32_t a_alignment = 256;

    std::vector<float> result;
};

Call make_call(cudaDataType_t input, cudaDataType_t output, int32_t batch = 1) {
    Call call;
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](Operand& operand, cudaDataType_t type, size_t rows, size_t columns) {
        operand.type = type;
        operand.rows = rows;
        operand.columns = columns;
        operand.batch = batch;
        operand.values.resize(rows * columns * static_cast<size_t>(batch));
        for (float& value : operand.values) value = round_to(type, normal(engine));
    };
    fill(call.a, input, m, k);
    fill(call.b, input, k, n);
    fill(call.c, output, m, n);
    fill(call.d, output, m, n);
    call.d.values.clear();
    for (size_t i = 0; i < m; ++i) call.bias.push_back(round_to(output, normal(engine)));
    for (size_t i = 0; i < m * n; ++i) call.aux.push_back(round_to(output, normal(engine)));
    return call;
}

void transpose(Operand& operand) {
    std::swap(operand.rows, operand.columns);
    const std::vector<float> before = operand.values;
    const size_t matrix = operand.rows * operand.columns;
    for (size_t i = 0; i < before.size(); ++i) {
        const size_t row = i % matrix % operand.rows, column = i % matrix / operand.rows;
        operand.values[i] = before[i / matrix * matrix + row * operand.columns + column];
    }
}

template <typename Value, typename Object, typename Attribute>
void set(cublasStatus_t (*setter)(Object*, Attribute, const void*, size_t), Object* object,
         Attribute attribute, Value value) {
    EXPECT_EQ(setter(object, attribute, &value, sizeof(value)), CUBLAS_STATUS_SUCCESS);
}

cublasLtMatrixLayout_t make_layout(const Operand& operand) {
    cublasLtMatrixLayout_t layout = nullptr;
    cublasLtMatrixLayoutCreate(&layout, operand.type, operand.rows, operand.columns,
                               operand.leading_dimension());
    set(cublasLtMatrixLayoutSetAttribute, layout, CUBLASLT_MATRIX_LAYOUT_ORDER, operand.order);
    set(cublasLtMatrixLayoutSetAttribute, layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, operand.batch);
    set(cublasLtMatrixLayoutSetAttribute, layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        operand.batch_offset());
    return layout;
}

// Runs the call; the first status that is not success.
cublasStatus_t run(Call& call) {
    cublasLtHandle_t handle = nullptr;
    cublasLtCreate(&handle);
    cublasLtMatmulDesc_t description = nullptr;
    cublasLtMatmulDescCreate(&description, call.compute, call.scale);
    const auto describe = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        set(cublasLtMatmulDescSetAttribute, description, attribute, value);
    };
    Operand vector, aux_matrix;
    vector.type = aux_matrix.type = call.d.type;
    vector.rows = m, vector.columns = 1, vector.values = call.bias;
    aux_matrix.rows = m, aux_matrix.columns = n, aux_matrix.values = call.aux;
    char *const bias = to_device(vector), *const aux = to_device(aux_matrix);
    describe(CUBLASLT_MATMUL_DESC_TRANSA, int32_t{call.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N});
    describe(CUBLASLT_MATMUL_DESC_TRANSB, int32_t{call.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N});
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE, call.epilogue);
    describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias));
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(aux));
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, call.aux_leading_dimension);

    cublasLtMatmulPreference_t preference = nullptr;
    cublasLtMatmulPreferenceCreate(&preference);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        set(cublasLtMatmulPreferenceSetAttribute, preference, attribute, value);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, call.max_workspace);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, call.a_alignment);
    for (const auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        prefer(operand, uint32_t{4});
    }

    char *const a = to_device(call.a), *const b = to_device(call.b),
                *const d = to_device(call.in_place ? call.c : call.d);
    char* const c = call.in_place ? d : to_device(call.c);
    char* workspace = nullptr;
    cudaMalloc(&workspace, 2 << 20);
    cublasLtMatrixLayout_t layouts[] = {make_layout(call.a), make_layout(call.b), make_layout(call.c),
                                        make_layout(call.d)};
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, description, layouts[0], layouts[1], layouts[2], layouts[3], preference, 1, &found, &count);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmul(handle, description, &call.alpha, a + call.a_shift, layouts[0], b, layouts[1],
                                &call.beta, c, layouts[2], d, layouts[3], &found.algo,
                                workspace + call.workspace_shift, call.given_workspace, nullptr);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        cudaDeviceSynchronize();
        call.result = to_host(call.d, d);
        if (call.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) call.aux = to_host(aux_matrix, aux);
    }
    for (char* memory : {a, b, call.in_place ? nullptr : c, d, workspace, bias, aux}) cudaFree(memory);
    for (cublasLtMatrixLayout_t layout : layouts) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(description);
    cublasLtDestroy(handle);
    return status;
}

// alpha A B + beta C before any transposition, in double, by the textbook.
Vector textbook(const Call& call) {
    Vector result;
    for (int32_t l = 0; l < call.d.batch; ++l) {
        for (size_t j = 0; j < n; ++j) {
            for (size_t i = 0; i < m; ++i) {
                double sum = 0;
                const size_t matrix = static_cast<size_t>(l);
                for (size_t p = 0; p < k; ++p) {
                    sum += double{call.a.values[matrix * m * k + p * m + i]} *
                           double{call.b.values[matrix * k * n + j * k + p]};
                }
                const double c = call.c.values[matrix * m * n + j * m + i];
                result.push_back(double{call.alpha} * sum + (call.beta != 0 ? double{call.beta} * c : 0));
            }
        }
    }
    return result;
}

void expect_close(const std::vector<float>& actual, const Vector& expected, cudaDataType_t type) {
    ASSERT_EQ(actual.size(), expected.size());
    const double roundoff = type == CUDA_R_32F ? 1e-6 : type == CUDA_R_16BF ? 0x1p-8 : 0x1p-11;
    for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_NEAR(actual[i], expected[i], 1.01 * roundoff * std::abs(expected[i]) + 2e-6) << i;
    }
}

TEST(CublasLt, ProductsInEveryLayout) {
    for (int bits = 0; bits < 512; ++bits) {
        SCOPED_TRACE(testing::Message() << "case " << bits);
        const auto bit = [bits](int i) { return (bits >> i & 1) != 0; };
        Call call = make_call(CUDA_R_32F, CUDA_R_32F, bit(0) ? 3 : 1);
        call.alpha = -1.5f;
        call.beta = bit(1) ? 0.75f : 0.0f;
        call.in_place = bit(2);
        const Vector expected = textbook(call);
        if ((call.transpose_a = bit(3))) transpose(call.a);
        if ((call.transpose_b = bit(4))) transpose(call.b);
        if (bit(5)) call.a.order = CUBLASLT_ORDER_ROW;
        if (bit(6)) call.b.order = CUBLASLT_ORDER_ROW;
        if (bit(7)) call.c.order = call.d.order = CUBLASLT_ORDER_ROW;
        if (bit(8)) {
            call.a.gap = 1, call.b.gap = 2, call.c.gap = call.d.gap = 3;
            call.b.batch_gap = 5;
        }
        call.a_alignment = 4;
        ASSERT_EQ(run(call), CUBLAS_STATUS_SUCCESS);
        expect_close(call.result, expected, CUDA_R_32F);
    }
}

TEST(CublasLt, EveryTypeOfTheTable) {
    for (const auto& [input, output] : {std::pair{CUDA_R_32F, CUDA_R_32F},
                                        {CUDA_R_16BF, CUDA_R_16BF},
                                        {CUDA_R_16BF, CUDA_R_32F},
                                        {CUDA_R_16F, CUDA_R_16F},
                                        {CUDA_R_16F, CUDA_R_32F}}) {
        Call call = make_call(input, output);
        call.beta = 1;
        ASSERT_EQ(run(call), CUBLAS_STATUS_SUCCESS) << input << " to " << output;
        expect_close(call.result, textbook(call), output);
    }
}

// Its inputs have 11 significant bits, which the exact product of rounded ones shows.
TEST(CublasLt, Tf32RoundsItsInputs) {
    Call call = make_call(CUDA_R_32F, CUDA_R_32F), rounded = call;
    for (Operand* operand : {&rounded.a, &rounded.b}) {
        for (float& value : operand->values) {
            int exponent;
            const double fraction = std::frexp(double{value}, &exponent);
            value = static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11));
        }
    }
    ASSERT_EQ(run(call), CUBLAS_STATUS_SUCCESS);
    expect_close(call.result, textbook(call), CUDA_R_32F);
    EXPECT_EQ(cudasim::last_product().compute, CUBLAS_COMPUTE_32F);
    call.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    ASSERT_EQ(run(call), CUBLAS_STATUS_SUCCESS);
    expect_close(call.result, textbook(rounded), CUDA_R_32F);
    EXPECT_EQ(cudasim::last_product().compute, CUBLAS_COMPUTE_32F_FAST_TF32);
}

TEST(CublasLt, Epilogues) {
    for (const cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F}) {
        Call call = make_call(type, type);
        const Vector product = textbook(call);
        Vector biased = product, derivative = product;
        for (size_t i = 0; i < m * n; ++i) {
            biased[i] += call.bias[i % m];
            derivative[i] *= reference::gelu_gradient(call.aux[i]);
        }
        const auto check = [&](cublasLtEpilogue_t epilogue, const Vector& expected) {
            SCOPED_TRACE(testing::Message() << "type " << type << " epilogue " << epilogue);
            call.epilogue = epilogue;
            ASSERT_EQ(run(call), CUBLAS_STATUS_SUCCESS);
            expect_close(call.result, expected, type);
        };
        check(CUBLASLT_EPILOGUE_DGELU, derivative);
        check(CUBLASLT_EPILOGUE_BIAS, biased);
        check(CUBLASLT_EPILOGUE_GELU, reference::map(reference::gelu, product));
        check(CUBLASLT_EPILOGUE_GELU_BIAS, reference::map(reference::gelu, biased));
        check(CUBLASLT_EPILOGUE_GELU_AUX_BIAS, reference::map(reference::gelu, biased));
        expect_close(call.aux, biased, type);
    }
}

void expect_status(cublasStatus_t expected, const char* what, void (*spoil)(Call&), int32_t batch = 1) {
    Call call = make_call(CUDA_R_16BF, CUDA_R_16BF, batch);
    spoil(call);
    EXPECT_EQ(run(call), expected) << what;
}

TEST(CublasLt, RefusesWhatTheTableDoesNotList) {
    const cublasStatus_t refused = CUBLAS_STATUS_NOT_SUPPORTED;
    expect_status(CUBLAS_STATUS_SUCCESS, "nothing wrong", [](Call&) {});
    expect_status(refused, "bf16 to fp16", [](Call& c) { c.c.type = c.d.type = CUDA_R_16F; });
    expect_status(refused, "two input types", [](Call& c) { c.b.type = CUDA_R_16F; });
    expect_status(refused, "fp32 to bf16", [](Call& c) { c.a.type = c.b.type = CUDA_R_32F; });
    expect_status(refused, "TF32 of bf16", [](Call& c) { c.compute = CUBLAS_COMPUTE_32F_FAST_TF32; });
    expect_status(refused, "fp16 sums of bf16", [](Call& c) { c.compute = CUBLAS_COMPUTE_16F; });
    expect_status(refused, "fp16 scalars for fp32 sums", [](Call& c) { c.scale = CUDA_R_16F; });
    expect_status(refused, "an unknown epilogue", [](Call& c) { c.epilogue = 3; });
    expect_status(refused, "GELU into a row-major D", [](Call& c) {
        c.epilogue = CUBLASLT_EPILOGUE_GELU_BIAS;
        c.c.order = c.d.order = CUBLASLT_ORDER_ROW;
    });
}

TEST(CublasLt, RefusesImpossibleArguments) {
    const cublasStatus_t refused = CUBLAS_STATUS_INVALID_VALUE;
    expect_status(refused, "leading dimension", [](Call& c) { c.a.gap = -1; });
    expect_status(refused, "shapes", [](Call& c) { c.a.columns--; });
    expect_status(refused, "batch counts", [](Call& c) { c.a.batch = 2; });
    expect_status(
        refused, "overlapping results", [](Call& c) { c.c.batch_gap = c.d.batch_gap = -8; }, 2);
    expect_status(refused, "orders of C and D", [](Call& c) { c.c.order = CUBLASLT_ORDER_ROW; });
    expect_status(refused, "types of C and D", [](Call& c) { c.c.type = CUDA_R_32F; });
    expect_status(refused, "in place with two layouts", [](Call& c) {
        c.c.gap = 1;
        c.in_place = true;
    });
    expect_status(refused, "less alignment than promised", [](Call& c) { c.a_shift = 2; });
    expect_status(
        refused, "less alignment of later matrices", [](Call& c) { c.a_alignment = 32; }, 2);
    expect_status(refused, "workspace too small", [](Call& c) { c.given_workspace = 4096; });
    expect_status(refused, "workspace misaligned", [](Call& c) { c.workspace_shift = 128; });
    expect_status(refused, "leading dimension of aux", [](Call& c) {
        c.epilogue = CUBLASLT_EPILOGUE_DGELU;
        c.aux_leading_dimension = 12;
    });
}

}  // namespace
