// What every op test needs: device buffers between guards, the runs that must agree bit for bit, and the
// judgement of a result against a reference in double.
#pragma once

#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "dev/test/reference.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/error.h"

// The shape of a floating-point format: `precision` significant bits, exponents of its normal numbers.
template <typename Storage>
struct Format;
template <>
struct Format<float> {
    static constexpr int precision = 24, min_exponent = -126, max_exponent = 127;
};
template <>
struct Format<bf16_t> {
    static constexpr int precision = 8, min_exponent = -126, max_exponent = 127;
};
template <>
struct Format<fp16_t> {
    static constexpr int precision = 11, min_exponent = -14, max_exponent = 15;
};

// The largest relative error of one rounding to nearest.
template <typename Storage>
double unit_roundoff() {
    return std::ldexp(1.0, -Format<Storage>::precision);
}

inline double to_double(double x) { return x; }
inline double to_double(int x) { return x; }
template <typename Storage>
double to_double(Storage x) {
    return to_float(x);
}

template <typename Element>
Vector doubles(const std::vector<Element>& x) {
    Vector result;
    result.reserve(x.size());
    for (const Element& element : x) result.push_back(to_double(element));
    return result;
}

template <typename Storage>
std::vector<Storage> rounded(const Vector& x) {
    std::vector<Storage> result;
    result.reserve(x.size());
    for (const double element : x) result.push_back(from_float<Storage>(static_cast<float>(element)));
    return result;
}

// ---------------------------------------------------------------------------------------------------
// Contents

// Fills guards and memory that an op must overwrite: a NaN in every floating-point type and a token far out
// of range, so that a value read from it shows in the result.
inline void fill_unwritten(void* memory, size_t bytes) {
    const uint16_t pattern = 0x7fff;
    for (size_t i = 0; i < bytes; i += 2) memcpy(static_cast<char*>(memory) + i, &pattern, 2);
}

template <typename Element>
std::vector<Element> unwritten(size_t n) {
    std::vector<Element> result(n);
    fill_unwritten(result.data(), n * sizeof(Element));
    return result;
}

// Normally distributed, the same on every run.
template <typename Storage>
std::vector<Storage> normal(size_t n, unsigned seed, double scale = 1, double mean = 0) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> distribution(mean, scale);
    Vector result(n);
    for (double& x : result) x = distribution(engine);
    return rounded<Storage>(result);
}

// Uniform in [0, limit).
inline std::vector<int> integers(size_t n, unsigned seed, size_t limit) {
    std::mt19937_64 engine(seed);
    std::vector<int> result(n);
    for (int& x : result) x = static_cast<int>(engine() % limit);
    return result;
}

// ---------------------------------------------------------------------------------------------------
// Device buffers

// Device memory holding `contents`, with a guard on both sides. A guard that was written shows when the
// buffer is read and when it goes; under AddressSanitizer (make SANITIZE=1) the read or write itself is
// reported. The front guard keeps the device's 256-byte alignment; the back one starts at the very next byte,
// whatever the size.
template <typename Element>
struct Buffer {
    Buffer(const std::vector<Element>& contents, Stream* stream_) : size(contents.size()), stream(stream_) {
        std::vector<char> bytes(total_bytes());
        fill_unwritten(bytes.data(), bytes.size());
        memcpy(bytes.data() + guard, contents.data(), size * sizeof(Element));
        memory = static_cast<char*>(device_malloc(bytes.size(), stream));
        copy_to_device(memory, bytes.data(), bytes.size(), stream);
        stream_synchronize(stream);  // the copy writes the guards too
        close_guards();
    }
    ~Buffer() {
        read();
        open_guards();
        device_free(memory, stream);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    Element* data() const { return reinterpret_cast<Element*>(memory + guard); }
    operator Element*() const { return data(); }

    std::vector<Element> read() const {
        std::vector<char> bytes(total_bytes()), untouched(guard);
        stream_synchronize(stream);  // queued ops meet closed guards
        open_guards();
        copy_to_host(bytes.data(), memory, bytes.size(), stream);
        close_guards();
        fill_unwritten(untouched.data(), guard);
        const char* back = bytes.data() + bytes.size() - guard;
        EXPECT_EQ(memcmp(bytes.data(), untouched.data(), guard), 0) << "written before the buffer's start";
        EXPECT_EQ(memcmp(back, untouched.data(), guard), 0) << "written past the buffer's end";
        std::vector<Element> result(size);
        memcpy(result.data(), bytes.data() + guard, size * sizeof(Element));
        return result;
    }
    Vector values() const { return doubles(read()); }

private:
    static constexpr size_t guard = 1024;
    size_t total_bytes() const { return 2 * guard + size * sizeof(Element); }

    // Both do nothing without the sanitizer.
    void close_guards() const {
        ASAN_POISON_MEMORY_REGION(memory, guard);
        ASAN_POISON_MEMORY_REGION(memory + total_bytes() - guard, guard);
    }
    void open_guards() const { ASAN_UNPOISON_MEMORY_REGION(memory, total_bytes()); }

    size_t size;
    Stream* stream;
    char* memory;
};

// ---------------------------------------------------------------------------------------------------
// Running an op

using StreamPointer = std::unique_ptr<Stream, void (*)(Stream*)>;

inline StreamPointer open_stream(int threads = 1) {
    return {stream_create({.index = 0, .threads = threads}), stream_destroy};
}

// What an op wrote, one vector a buffer. Every storage type is exact in double, so equal values here are
// equal bits there.
using Outputs = std::vector<Vector>;

inline void expect_same_bits(const Outputs& actual, const Outputs& expected, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_EQ(actual[i].size(), expected[i].size());
        for (size_t j = 0; j < actual[i].size(); ++j) {
            ASSERT_EQ(memcmp(&actual[i][j], &expected[i][j], sizeof(double)), 0)
                << what << ": output " << i << " differs at " << j << ": " << actual[i][j] << " and "
                << expected[i][j];
        }
    }
}

// True on the CUDA simulator, a thousand times slower than what it stands for: sizes that only a backend's
// caches and blocks ask for are not for it.
inline bool on_simulator(Stream* stream) { return device_name(stream).starts_with("simulated"); }

// Runs the op twice on one thread, then on two and three: the bits may not change. The CUDA simulator has no
// threads, but an order of its own for the blocks and threads of each launch: there these are four orders, or
// two where the result is large.
inline Outputs run_op(const std::function<Outputs(Stream*)>& op) {
    const StreamPointer one = open_stream(1);
    const Outputs outputs = op(one.get());
    expect_same_bits(op(one.get()), outputs, "second run");
    if (on_simulator(one.get())) {
        size_t size = 0;
        for (const Vector& output : outputs) size += output.size();
        for (int run = 3; run <= 4 && size < 20000; ++run)
            expect_same_bits(op(one.get()), outputs, "another order");
        return outputs;
    }
    for (const int threads : {2, 3}) {
        const StreamPointer stream = open_stream(threads);
        expect_same_bits(op(stream.get()), outputs, std::to_string(threads) + " threads");
    }
    return outputs;
}

// ---------------------------------------------------------------------------------------------------
// Judging the result

// The relative error that a result stored as Storage may have: its own rounding, that of one intermediate,
// and fp32 arithmetic over a sum of `length` terms, whose errors add up like a random walk.
template <typename Storage>
double tolerance(size_t length) {
    return 2 * unit_roundoff<Storage>() + (6 + std::sqrt(length)) * unit_roundoff<float>();
}

// Normalised mean square error below tolerance^2, and no single error above 6 tolerances of the element's
// own size plus the result's root mean square. A NaN or infinity where the reference has none fails.
// With PRINT_ERRORS in the environment it also says how much of the allowance was used.
template <typename Storage>
void expect_close(const char* name, const Vector& actual, const Vector& expected, size_t length,
                  double slack = 1) {
    ASSERT_EQ(actual.size(), expected.size()) << name;
    const double allowed = slack * tolerance<Storage>(length);
    double square_error = 0, square = 0, worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        square_error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
        square += expected[i] * expected[i];
    }
    const double rms = std::sqrt(square / expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(actual[i] - expected[i]);
        const double limit = 6 * allowed * (rms + std::abs(expected[i]));
        ASSERT_TRUE(error <= limit) << name << "[" << i << "] is " << actual[i] << ", expected "
                                    << expected[i] << ", error " << error << " above " << limit;
        worst = std::max(worst, limit > 0 ? error / limit : 0);
    }
    EXPECT_LE(square_error, allowed * allowed * square) << name << ": normalised mean square error too large";
    if (getenv("PRINT_ERRORS") != nullptr) {
        printf("%-12s %s: error %.2f of what is allowed, worst element %.2f\n", name,
               testing::UnitTest::GetInstance()->current_test_info()->name(),
               square > 0 ? std::sqrt(square_error / square) / allowed : 0, worst);
    }
}

// The call is refused with an Error whose one line names the op or flag.
inline void expect_refused(const char* name, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << name << ": not refused";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << name << ": " << error.what();
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
}
